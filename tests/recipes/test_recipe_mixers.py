"""Every mixer through the recipes: alignment, distillation by LoRA and in full, the saved model, resumed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from deltanet_hf.mixers import FLOAT32_NAMES
from deltanet_hf.mixers.quadratic.attention_kind import AttentionKind
from deltanet_hf.models.layers import LayerTable
from deltanet_recipes.schema_sections import Optimizer
from deltanet_recipes.training.logbook import read_log
from deltanet_recipes.training.model_pair import load_student, mixers
from deltanet_recipes.training.optim import parameter_groups
from deltanet_recipes.training.pipeline import run
from support.registry import rows
from support.tiny_run import ALIGN, DISTIL, WORDS, interrupted_at, losses, make_workplace, tiny_recipe

SETTINGS: dict[str, dict[str, Any]] = {
    "window": {"window": 4, "sinks": 1},  # no document is longer than the default window
    "mixed_heads": {"heads": ["softmax", "linear", "window", "softmax"], "window": 4, "sinks": 1},
}
IDS = torch.randint(4, 4 + WORDS, (2, 40), generator=torch.Generator().manual_seed(3))


every_mixer = pytest.mark.parametrize("workplace", rows(), indirect=True, scope="module")
mixers_in_full = pytest.mark.parametrize("workplace", rows(all_by_default=False), indirect=True, scope="module")


@pytest.fixture(scope="module")
def workplace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a student with this mixer in layers 0 and 2, beside its softmax layer 1."""
    settings = {"mixer": request.param, **SETTINGS.get(request.param, {})}
    return make_workplace(tmp_path_factory.mktemp(request.param), layers=(0, 2), **settings)


def train(workplace: Path, out: Path, stages: list[dict[str, Any]], checkpoint_every: int = 2, **data: Any) -> Path:
    """Run a recipe and return the folder of the final model."""
    log = {"every": 1, "evaluate_every": 100, "checkpoint_every": checkpoint_every}
    return run(tiny_recipe(workplace, out, *stages, data=data, log=log))


def stages_for(workplace: Path, distil: dict[str, Any]) -> list[dict[str, Any]]:
    """An align stage, where the mixer has weights to align, and a distil stage."""
    align = {**ALIGN, "tokens": 128 * 6}
    return [*([align] if mixers(load_student(str(workplace / "student"))) else []), {**DISTIL, **distil}]


@every_mixer
def test_it_is_aligned_and_distilled(workplace: Path, tmp_path: Path) -> None:
    check_training(workplace, tmp_path, "full", isolated=True)


@mixers_in_full
def test_it_is_trained_by_adapters_on_rows_of_several_documents(workplace: Path, tmp_path: Path) -> None:
    check_training(workplace, tmp_path, "lora", isolated=False)


def check_training(workplace: Path, tmp_path: Path, train_key: str, isolated: bool) -> None:
    """A run lowers the errors of both stages and moves all new parameters and matrices."""
    stages = stages_for(workplace, {"tokens": 128 * 12, "train": train_key})
    final = train(workplace, tmp_path / "run", stages, checkpoint_every=100, isolate_documents=isolated)
    rows = read_log(tmp_path / "run")
    aligned = [row["held_out.error.0"] for row in rows if "held_out.error.0" in row]
    distilled = [row["held_out.kl"] for row in rows if "held_out.kl" in row]
    assert len(aligned) >= 2 or len(stages) == 1
    assert not aligned or aligned[-1] < aligned[0]
    assert distilled[-1] < distilled[0]
    before, after = (load_file(folder / "model.safetensors") for folder in (workplace / "student", final))
    assert before.keys() == after.keys()
    student = load_student(str(workplace / "student"))
    new = {id(p) for mixer in mixers(student).values() for p in mixer.parameters()}
    for name, parameter in student.named_parameters():
        matrix = parameter.dim() == 2 and ".layers." in name
        if id(parameter) in new or matrix:
            assert not torch.equal(before[name], after[name]), name
        wide = name.rpartition(".")[2] in FLOAT32_NAMES
        assert after[name].dtype == (torch.float32 if wide else before[name].dtype)


@mixers_in_full
def test_an_interrupted_run_has_the_same_losses_and_a_model_with_its_layer_table(
    workplace: Path, tmp_path: Path
) -> None:
    stages = stages_for(workplace, {"train": "full", "tokens": 128 * 6})
    train(workplace, tmp_path / "a" / "run", stages)
    with interrupted_at(5):
        train(workplace, tmp_path / "b" / "run", stages)
    final = train(workplace, tmp_path / "b" / "run", stages)
    assert losses(tmp_path / "a" / "run") == losses(tmp_path / "b" / "run")
    model = AutoModelForCausalLM.from_pretrained(final).eval()
    student = load_student(str(workplace / "student"))
    assert LayerTable.of(model.config) == LayerTable.of(student.config)
    student.load_state_dict(load_file(final / "model.safetensors"), strict=False)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS, use_cache=False).logits, student(IDS).logits)
    card = (final / "README.md").read_text()
    (kind,) = LayerTable.of(model.config).kinds.values()
    title = "Gated DeltaNet" if kind.mixer.name == "mixed_heads" else kind.mixer.title
    assert f"# {title if kind.has_new_weights else 'Windowed'} student of " in card
    assert ("linear-attention" in card) == (kind.has_new_weights and not issubclass(kind.mixer, AttentionKind))


def test_muon_takes_the_matrices_of_further_writes(tmp_path: Path) -> None:
    folder = make_workplace(tmp_path, mixer="deltaproduct", num_householder=2)
    student = load_student(str(folder / "student"))
    groups = {
        id(p): group["name"] for group in parameter_groups(student, Optimizer(name="muon")) for p in group["params"]
    }
    mixer = student.model.layers[0].self_attn
    write = mixer.householder[0]
    for name in ("k_proj", "v_proj"):
        assert groups[id(getattr(write, name).weight)] == "mixer"
        assert groups[id(getattr(mixer, name).weight)] == "rest"  # the teacher's
    assert groups[id(write.b_proj.bias)] == groups[id(write.b_proj.weight)] == "mixer.vectors"
