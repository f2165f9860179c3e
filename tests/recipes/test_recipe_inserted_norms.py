"""A hybrid whose kept layers got q/k norms at conversion: alignment does not change them, distillation trains them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deltanet_convert.start.norm_config import with_norms
from deltanet_hf import LayerTable, converted_config
from deltanet_hf.models.factory import model_class
from deltanet_hf.models.families import FAMILIES
from deltanet_hf.models.layers import INSERTED_QK_NORMS
from deltanet_recipes.schema import Distil
from deltanet_recipes.training.adapters import inserted_norms, train_for
from deltanet_recipes.training.model_pair import load_student
from deltanet_recipes.training.pipeline import run
from support.tiny_run import ALIGN, DISTIL, LAYERS, NO_CHECKPOINTS, SHAPE, make_workplace, tiny_recipe

NORMS = {f"model.layers.1.self_attn.{name}_norm.weight" for name in "qk"}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A softmax teacher, and a student with Qwen3.5's layer and inserted norms in layer 1."""
    folder = make_workplace(tmp_path_factory.mktemp("models"))
    torch.manual_seed(0)
    config = with_norms(FAMILIES["llama"].config_class(**SHAPE), [1])
    table = LayerTable.preset(LAYERS, profile="qwen3_5", softmax=(1,))
    student = model_class("qwen3")(converted_config(config, table))
    student.load_state_dict(load_file(folder / "teacher" / "model.safetensors"), strict=False)
    student.save_pretrained(folder / "student")
    return folder


def moved_by(workplace: Path, out: Path, stage: dict[str, object]) -> set[str]:
    """The names of the weights that a run of one stage changes."""
    run(tiny_recipe(workplace, out / "run", stage, log=NO_CHECKPOINTS))
    before, after = (load_file(f / "model.safetensors") for f in (workplace / "student", out / "run" / "final"))
    assert json.loads((out / "run" / "final" / "config.json").read_text())[INSERTED_QK_NORMS] == [1]
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


@pytest.mark.parametrize("train", ["lora", "full", "frozen"])
def test_distillation_trains_inserted_norms(workplace: Path, tmp_path: Path, train: str) -> None:
    moved = moved_by(workplace, tmp_path / "run", {**DISTIL, "tokens": 512, "train": train})
    assert moved >= NORMS
    assert ("model.layers.1.self_attn.q_proj.weight" in moved) == (train != "frozen")


def test_alignment_leaves_them(workplace: Path, tmp_path: Path) -> None:
    moved = moved_by(workplace, tmp_path / "run", {**ALIGN, "tokens": 512})
    assert moved
    assert not moved & NORMS


def test_float32_norms_work_under_autocast(workplace: Path) -> None:
    student = load_student(str(workplace / "student"), torch.bfloat16)
    train_for(student, Distil(tokens=8192), seed=0)
    norms = inserted_norms(student)
    assert [norm.weight.dtype for norm in norms] == [torch.float32] * 2
    with torch.autocast("cpu", torch.bfloat16):
        loss = student(torch.arange(4, 40)[None], labels=torch.arange(4, 40)[None]).loss
    loss.backward()
    assert all(norm.weight.grad is not None and norm.weight.grad.abs().sum() > 0 for norm in norms)
