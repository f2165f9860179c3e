"""The long stage on a tiny model, and batches that one captured CUDA graph can serve whatever documents they pack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils import _pytree as pytree

from deltanet_recipes.data.packing import Mixture, split_streams
from deltanet_recipes.data.tokens import load_corpus
from deltanet_recipes.training.adapters import train_for
from deltanet_recipes.training.feeds import RowFeed
from deltanet_recipes.training.logbook import read_log
from deltanet_recipes.training.losses import Head, KlTerms, live_chunk
from deltanet_recipes.training.microstep import MicroStep
from deltanet_recipes.training.model_pair import load_student, load_teacher
from deltanet_recipes.training.objectives import AlignLoss, DistilLoss
from deltanet_recipes.training.pipeline import run
from deltanet_recipes.training.runtime import Runtime
from support.tiny_run import DISTIL, NO_CHECKPOINTS, make_tokenizer, tiny_recipe

SEPARATOR = 2
LONG: dict[str, Any] = {
    "kind": "long",
    "tokens": 512 * 12,
    "sequence_length": 256,
    "batch_tokens": 512,
    "optimizer": {"mixer_lr": 1e-2, "rest_lr": 1e-2},
    "lora_rank": 4,
}


def test_a_long_stage_goes_on_from_distil_on_longer_rows(workplace: Path, tmp_path: Path) -> None:
    stages = [{**stage, "train": "lora"} for stage in ({**DISTIL, "tokens": 128 * 6}, LONG)]
    run(tiny_recipe(workplace, tmp_path / "run", *stages, data={"holdout_tokens": 512}, log=NO_CHECKPOINTS))
    long = [row for row in read_log(tmp_path / "run") if row["stage"] == "long"]
    assert [row["step"] for row in long] == list(range(13))
    assert long[-1]["tokens"] == 512 * 12
    assert long[-1]["total_steps"] == 6 + 12
    assert long[-1]["held_out.kl"] < 0.9 * long[0]["held_out.kl"]
    distilled = load_file(tmp_path / "run" / "stages" / "00-distil.safetensors")
    final = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert any(not torch.equal(final[name], distilled[name]) for name in distilled if ".mlp." in name)


def test_a_long_stage_has_defaults_of_its_own(workplace: Path, tmp_path: Path) -> None:
    (stage,) = tiny_recipe(workplace, tmp_path / "run", {"kind": "long", "tokens": 65536}).stages
    assert (stage.sequence_length, stage.batch_tokens, stage.rows_per_step) == (16384, 65536, 4)
    assert (stage.optimizer.mixer_lr, stage.optimizer.rest_lr) == (3e-5, 1e-5)


@pytest.fixture
def feed(workplace: Path, tmp_path: Path) -> tuple[Any, RowFeed, Runtime]:
    """A recipe, and rows of 256 tokens with about 6 documents each, whose number varies."""
    recipe = tiny_recipe(workplace, tmp_path / "run", LONG)
    corpus = load_corpus(recipe.data.sources[0], make_tokenizer(), SEPARATOR, tmp_path)
    training, _ = split_streams([corpus], 256, 0, True)
    runtime = Runtime(recipe.engine)
    mixture = Mixture(training, SEPARATOR, isolate=True, repeat=True)
    return recipe, RowFeed(mixture, recipe.stages[0], runtime, score_all=False), runtime


@pytest.mark.parametrize("kind", ["align", "distil"])
def test_packed_rows_differ_in_the_contents_of_tensors_only(feed: tuple[Any, RowFeed, Runtime], kind: str) -> None:
    """A graph keeps the shapes, Python values and addresses of its first batch; only contents can be copied."""
    recipe, rows, runtime = feed
    student, teacher = load_student(recipe.student), load_teacher(recipe, torch.float32)
    train_for(student, recipe.stages[0], seed=0)
    if kind == "align":
        objective: Any = AlignLoss(teacher, student)
    else:
        chunk = live_chunk(Head.of(student), Head.of(teacher), KlTerms())
        objective = DistilLoss(student, teacher, chunk, 100)
    parameters = [p for p in student.parameters() if p.requires_grad]
    batches = [objective.prepare(rows.step()[0]) for _ in range(6)]
    documents = {int((batch.rows.position_ids == 0).sum()) for batch in batches}
    assert len(documents) > 1
    leaves, tree = pytree.tree_flatten(batches[0])
    copies: dict[int, torch.Tensor] = {}
    static = [copies.setdefault(id(x), x.detach().clone()) if isinstance(x, torch.Tensor) else x for x in leaves]
    recorded = pytree.tree_unflatten(static, tree)
    step = MicroStep(runtime, objective, parameters)
    for batch in batches[1:]:
        other, same_tree = pytree.tree_flatten(batch)
        assert same_tree == tree
        for mine, theirs in zip(static, other, strict=True):
            if isinstance(theirs, torch.Tensor):
                assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
                mine.copy_(theirs)
            else:
                assert mine is theirs or mine == theirs
        torch.testing.assert_close(step.run_eagerly(recorded), step.run_eagerly(batch), rtol=1e-6, atol=1e-6)
