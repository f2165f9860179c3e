"""The window baseline: a student converted with `--mixer window`, trained and measured like any other."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM, AutoTokenizer

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.report.model_rows import ModelRows, line_up
from deltanet_hf.evaluation.tasks.lm_eval_model import DeltaNetLM
from deltanet_hf.generate import generate_command
from deltanet_hf.models.decoder import LayerwiseDecoder
from deltanet_hf.models.restrict import restrict_to_window
from deltanet_recipes.data.packing import make_rows
from deltanet_recipes.training.layer_runner import LayerRunner, document_boundaries
from deltanet_recipes.training.logbook import read_log
from deltanet_recipes.training.microstep import compile_layers
from deltanet_recipes.training.model_pair import decoder_layers, load_student
from deltanet_recipes.training.pipeline import run
from measuring.study.model_facts import load_for_measure
from support.tiny_models import tiny_student
from support.tiny_run import ALIGN, DISTIL, NO_CHECKPOINTS, WORDS, make_workplace, tiny_recipe

LENGTH = 128  # the window of 64 must hide something
STAGE = {**DISTIL, "sequence_length": LENGTH, "tokens": 128 * 12, "optimizer": {"rest_lr": 1e-3}}
IDS = torch.randint(4, 4 + WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workplace(tmp_path_factory.mktemp("models"), mixer="window", window=64)


def recipe(workplace: Path, out: Path, stages: list[dict[str, Any]], **changes: Any) -> Any:
    data = {"isolate_documents": False, **changes.pop("data", {})}
    log = {
        **NO_CHECKPOINTS,
        "stop_when_worse": False,
    }  # windows have the teacher's weights: few steps teach them little
    return tiny_recipe(workplace, out, *stages, data=data, log=log, **changes)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS, use_cache=False).logits


def teacher_with(weights: Path, workplace: Path) -> Any:
    """The softmax teacher, unrestricted, with the weights of another folder."""
    model = AutoModelForCausalLM.from_pretrained(workplace / "teacher").eval()
    assert not model.load_state_dict(load_file(weights / "model.safetensors"), strict=False).unexpected_keys
    return model


@pytest.fixture(scope="module")
def trained(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(recipe(workplace, tmp_path_factory.mktemp("window") / "run", [{**STAGE, "train": "full"}]))


@pytest.mark.parametrize("train", ["full", "lora"])
def test_the_loss_falls_and_only_the_chosen_weights_move(workplace: Path, tmp_path: Path, train: str) -> None:
    stage = {**STAGE, "train": train, "batch_tokens": 256, "tokens": 256 * 150}
    stage["optimizer"] = {"rest_lr": 3e-4 if train == "full" else 1e-3}
    final = run(recipe(workplace, tmp_path / "run", [stage], data={"holdout_tokens": 1024}))
    rows = read_log(tmp_path / "run")
    assert rows[0]["held_out.kl"] > 1e-3  # restricted from the start
    # A teacher with random weights looks everywhere: little of what the window hides can be learnt.
    assert rows[-1]["held_out.kl"] < 0.97 * rows[0]["held_out.kl"]
    before, after = load_file(workplace / "teacher" / "model.safetensors"), load_file(final / "model.safetensors")
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in before if name.endswith("proj.weight")} <= moved
    assert ("model.norm.weight" in moved) == (train == "full")
    assert "model.embed_tokens.weight" not in moved


@torch.no_grad()
def test_isolated_documents_have_a_window_and_sinks_of_their_own(workplace: Path) -> None:
    student = load_student(str(workplace / "student"))
    ids = np.concatenate([IDS[0, :99], [2], IDS[1, :81]])[None]  # a document of 100 tokens and one of 80
    rows = make_rows(ids, np.ones_like(ids, dtype=bool), 2, True)
    layers = LayerRunner(student)
    hidden, _ = layers.run_layers(layers.embed(rows, document_boundaries(rows.position_ids)))
    for part in (slice(0, 100), slice(100, 180)):
        alone = student.model(input_ids=rows.input_ids[:, part]).last_hidden_state
        torch.testing.assert_close(hidden[:, part], alone)


def test_everything_that_measures_it_measures_it_under_its_window(trained: Path, workplace: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(trained).eval()
    assert plain.config.deltanet["kinds"] == {"local": {"mixer": "window", "window": 64, "sinks": 4}}
    unrestricted = teacher_with(trained, workplace)
    free = logits(unrestricted)
    wanted = logits(restrict_to_window(unrestricted))
    assert not torch.allclose(free[:, 70:], wanted[:, 70:], atol=1e-3)
    torch.testing.assert_close(logits(plain), wanted)
    torch.testing.assert_close(logits(load_for_measure(str(trained), torch.device("cpu"))), wanted)
    torch.testing.assert_close(logits(DeltaNetLM(str(trained), device="cpu").model), wanted)
    rows = line_up(str(workplace / "teacher"), [f"window-distilled={trained}"], ())
    models, row = ModelRows(rows, "cpu", "auto"), rows[1]
    teacher, student = models.model(rows[0]), models.model(row)
    assert (row.name, row.kind, row.tokens) == ("window-distilled", "student", STAGE["tokens"])
    torch.testing.assert_close(logits(student), wanted)
    original = AutoModelForCausalLM.from_pretrained(workplace / "teacher").eval()
    torch.testing.assert_close(logits(teacher), logits(original))
    card = (trained / "README.md").read_text()
    assert "# Windowed student of " in card
    assert ModelCard(card).data.tags == ["distillation"]


@torch.no_grad()
def test_generate_continues_under_the_window(
    trained: Path, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained)
    words: list[str] = []
    for model in (teacher_with(trained, workplace), restrict_to_window(teacher_with(trained, workplace))):
        ids = IDS[:1]
        for _ in range(8):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        words.append(tokenizer.decode(ids[0, LENGTH:], skip_special_tokens=True))
    assert words[0] != words[1]
    generate_command(str(trained), tokenizer.decode(IDS[0]), max_new_tokens=8, device="cpu")
    assert capsys.readouterr().out.split() == words[1].split()


def test_stages_without_anything_to_train_are_one_clear_error(workplace: Path, tmp_path: Path) -> None:
    for stage, words in (
        (ALIGN, "stages: .* nothing to align"),
        ({**STAGE, "train": "frozen"}, "stages.distil: .* trains nothing; use lora or full"),
    ):
        with pytest.raises(UserError, match=rf"^(?s:(?!.*\n)){words}$"):
            run(recipe(workplace, tmp_path / "run", [stage]))
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "layer", [{"mixer": "window", "window": 40}, {"mixer": "gated_deltanet+window", "window": 33}], ids=str
)
def test_a_student_that_reads_further_is_trained_beyond_its_teachers_positions(
    tmp_path: Path, layer: dict[str, Any]
) -> None:
    workplace = make_workplace(tmp_path, **layer)
    file = workplace / "student" / "config.json"
    config = json.loads(file.read_text())
    config["deltanet"]["positions"] = {"kind": "yarn", "teacher": 256, "context": 512}
    file.write_text(json.dumps(config | {"max_position_embeddings": 512}))
    stage = {**STAGE, "sequence_length": 320, "batch_tokens": 640, "tokens": 640 * 2}
    final = run(
        recipe(workplace, tmp_path / "a" / "run", [{**stage, "far_ce_weight": 0.5}], data={"holdout_tokens": 640})
    )
    assert read_log(tmp_path / "a" / "run")[-1]["held_out.loss"] > 0
    assert load_student(str(final)).config.deltanet == config["deltanet"]
    with pytest.raises(UserError, match="sequence_length: got 320, and the teacher's positions end at 256"):
        run(recipe(workplace, tmp_path / "b" / "run", [stage]))
    further = {**stage, "sequence_length": 640, "batch_tokens": 640, "far_ce_weight": 0.5}
    with pytest.raises(UserError, match="got 640, and the student's positions end at 512"):
        run(recipe(workplace, tmp_path / "c" / "run", [further]))


def test_windows_of_several_lengths_share_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is compiled for its length, the second for any."""
    student = tiny_student("llama", mixer="window", window=5, sinks=2).train()
    layers = decoder_layers(student)
    for index, layer in enumerate(layers):
        layer.self_attn.use_window(40 + 32 * index)  # type: ignore[union-attr, operator]
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr(torch._dynamo.config, "allow_unspec_int_on_nn_module", False)  # as it is afterwards
    compile_layers(layers)
    inputs = LayerwiseDecoder(student).enter(input_ids=torch.randint(3, 60, (1, 256)))
    hidden = inputs.hidden
    for layer, kwargs in zip(layers, inputs.kwargs, strict=True):
        hidden = layer(hidden, **kwargs)
    assert counter.frame_count == 2 < len(layers)
