"""The KL weighted by recall: the windowed teacher, the weights, and the training with them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltanet_hf.errors import UserError
from deltanet_hf.models.restrict import restrict_to_window
from deltanet_recipes.data.packing import make_rows
from deltanet_recipes.training.layer_runner import LayerRunner, document_boundaries
from deltanet_recipes.training.logbook import read_log
from deltanet_recipes.training.losses import RECALL_CAP, Head, KlTerms, live_chunk, recall_weights
from deltanet_recipes.training.model_pair import load_student
from deltanet_recipes.training.objectives import Batch, DistilLoss
from deltanet_recipes.training.pipeline import run
from deltanet_recipes.training.windowed_teacher import windowed_inputs
from support.tiny_models import tiny_student, tiny_teacher
from support.tiny_run import DISTIL, losses, make_workplace, tiny_recipe

EOS = 2
LENGTH = 120  # more than the window of 64


def rows_of(isolate: bool) -> Any:
    ids = np.random.default_rng(0).integers(3, 97, (2, LENGTH + 1))
    ids[0, 99] = ids[1, 20] = EOS
    return make_rows(ids, np.ones_like(ids, dtype=bool), EOS, isolate)


@pytest.mark.parametrize(
    ("family", "isolate"), [("llama", False), ("llama", True), ("gemma3_text", False), ("olmo3", True), ("phi3", False)]
)
@torch.no_grad()
def test_narrower_masks_equal_the_window_as_a_kind_of_layer(family: str, isolate: bool) -> None:
    teacher, rows = tiny_teacher(family), rows_of(isolate)
    runner = LayerRunner(teacher)
    entry = runner.embed(rows, document_boundaries(rows.position_ids))
    full, _ = runner.run_layers(entry)
    found, _ = runner.run_layers(windowed_inputs(entry, rows, isolate))
    restricted = LayerRunner(restrict_to_window(copy.deepcopy(teacher), 64, 4))
    expected, _ = restricted.run_layers(restricted.embed(rows, document_boundaries(rows.position_ids)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    again, _ = runner.run_layers(entry)
    torch.testing.assert_close(again, full, rtol=0, atol=0)
    if family in ("llama", "phi3"):  # the others have narrow windows of their own in some layers
        assert not torch.allclose(found[:, 70:], full[:, 70:], atol=1e-3)
        torch.testing.assert_close(found[:, :64], full[:, :64], rtol=1e-4, atol=1e-4)


def test_weights_are_bounded_and_one_where_the_window_suffices() -> None:
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(9, 40, generator=generator)
    windowed = teacher.clone()
    windowed[3] += torch.randn(40, generator=generator)
    windowed[4] = -100 * teacher[4]
    weights = recall_weights(teacher, windowed, 3.0)
    log_t, log_w = teacher.log_softmax(-1), windowed.log_softmax(-1)
    wanted = 1 + 3 * (log_t.exp() * (log_t - log_w)).sum(-1).clamp(max=RECALL_CAP)
    torch.testing.assert_close(weights, wanted)
    assert weights[4] == pytest.approx(1 + 3 * RECALL_CAP)
    assert 1.0 < float(weights[3]) <= 1 + 3 * RECALL_CAP
    assert (weights - 1).abs()[[0, 1, 2, 5, 6, 7, 8]].max() < 1e-5


def test_weights_have_mean_one_on_the_rows_they_were_measured_on() -> None:
    teacher, student, rows = tiny_teacher("llama").requires_grad_(False), tiny_student("llama"), rows_of(False)
    heads = Head.of(student), Head.of(teacher)
    chunk = live_chunk(*heads, KlTerms(recall_weight=5.0))
    objective = DistilLoss(student, teacher, chunk, 50, recall_weight=5.0)
    batch = Batch(rows, None, torch.tensor(float(rows.scored.sum())))
    objective.measure_mean_weight([batch])
    mean = float(objective.mean_weight)
    assert 1.01 < mean < 1 + 5 * RECALL_CAP
    runner = LayerRunner(teacher)
    entry = runner.embed(rows, None)
    logits = [
        heads[1].logits(runner.run_layers(inputs)[0].flatten(0, 1), teacher.get_output_embeddings().weight)
        for inputs in (entry, windowed_inputs(entry, rows, False))
    ]
    weights = recall_weights(logits[0], logits[1], 5.0)[rows.scored.flatten()] / mean
    assert float(weights.mean()) == pytest.approx(1.0, rel=1e-5)
    # Micro-batches add up, because the mean is a constant.
    whole, (kl, _) = (part.detach() for part in objective(batch))
    parts = [objective(Batch(rows[i : i + 1], None, batch.scored))[0].detach() for i in range(2)]
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-5)
    assert float(whole) != pytest.approx(float(kl), rel=1e-3)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workplace(tmp_path_factory.mktemp("models"), layers=(0, 2))


def recipe(workplace: Path, out: Path, stage: dict[str, Any], **changes: Any) -> Any:
    return tiny_recipe(workplace, out / "run", stage, **changes)


WEIGHTED = {**DISTIL, "sequence_length": 128, "recall_weight": 4.0}
WEIGHTED["optimizer"] = {**DISTIL["optimizer"], "projection_lr": 3e-3}


@pytest.mark.parametrize(("train", "isolate"), [("lora", True), ("full", False)])
def test_it_trains(workplace: Path, tmp_path: Path, train: str, isolate: bool) -> None:
    stage = {**WEIGHTED, "tokens": 128 * 12, "train": train}
    run(recipe(workplace, tmp_path, stage, data={"isolate_documents": isolate}))
    rows = read_log(tmp_path / "run")
    assert rows[-1]["held_out.kl"] < 0.97 * rows[0]["held_out.kl"]


def test_no_held_out_rows_and_no_weight_change_nothing_else(workplace: Path, tmp_path: Path) -> None:
    """The sample for the mean is not taken out of the training data; c = 0 is the plain loss."""
    changes = {"data": {"holdout_tokens": 0, "isolate_documents": False}}
    run(recipe(workplace, tmp_path / "a", {**WEIGHTED, "recall_weight": 0.0}, **changes))
    run(recipe(workplace, tmp_path / "b", {**WEIGHTED, "recall_weight": 1e-9}, **changes))
    plain, weighted = ([loss for *_, loss in losses(tmp_path / name / "run")] for name in "ab")
    assert len(plain) == 12
    assert plain == pytest.approx(weighted, rel=1e-4)


def test_what_cannot_be_weighted_is_refused(workplace: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="kl_weight is 0"):
        recipe(workplace, tmp_path, {**WEIGHTED, "kl_weight": 0.0, "ce_weight": 1.0})
    student = str(workplace / "student")
    with pytest.raises(UserError, match=r"^stages.distil.recall_weight: needs a softmax teacher.*leave the key out$"):
        run(recipe(workplace, tmp_path, {**WEIGHTED, "ce_weight": 0.1}, teacher=student))
    assert load_student(student) is not None
