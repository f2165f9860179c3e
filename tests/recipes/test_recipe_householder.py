"""Distillation of a student whose state is written several times per token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deltanet_recipes.config import load_recipe
from deltanet_recipes.schema_sections import Optimizer
from deltanet_recipes.training.logbook import read_log
from deltanet_recipes.training.model_pair import load_student
from deltanet_recipes.training.optim import parameter_groups
from deltanet_recipes.training.pipeline import run
from tests.recipes.tiny_run import ALIGN, DISTIL, make_workplace, recipe_tree, write_recipe


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workplace(tmp_path_factory.mktemp("models"), householder_steps=2)


@pytest.mark.parametrize("isolated", [False, True])
def test_both_stages_train_the_new_step(workplace: Path, tmp_path: Path, isolated: bool) -> None:
    muon = {"name": "muon", "mixer_lr": 6.0e-3, "rest_lr": 2.0e-3}
    stages = [{**ALIGN, "tokens": 128 * 10}, {**DISTIL, "tokens": 128 * 20, "train": "full", "optimizer": muon}]
    tree = recipe_tree(workplace, stages, output=str(tmp_path / "run"), data={"isolate_documents": isolated})
    run(load_recipe(write_recipe(tmp_path, tree)))
    rows = read_log(tmp_path / "run")
    aligned = [row["held_out.error.0"] for row in rows if "held_out.error.0" in row]
    distilled = [row["held_out.kl"] for row in rows if "held_out.kl" in row]
    assert aligned[-1] < aligned[0]
    assert distilled[-1] < 0.97 * distilled[0]
    before, after = (load_file(path / "model.safetensors") for path in (workplace / "student", tmp_path / "run/final"))
    new = [name for name in before if ".householder." in name]
    assert len(new) == 3 * 4  # k_proj, v_proj, b_proj with its bias
    assert not [name for name in new if torch.equal(before[name], after[name])]


def test_the_new_matrices_are_muons_like_the_layers_own(workplace: Path) -> None:
    student = load_student(str(workplace / "student"))
    groups = {
        id(p): group["name"] for group in parameter_groups(student, Optimizer(name="muon")) for p in group["params"]
    }
    mixer = student.model.layers[0].self_attn
    step = mixer.householder[0]
    for name in ("k_proj", "v_proj"):
        assert groups[id(getattr(step, name).weight)] == groups[id(getattr(mixer, name).weight)] == "mixer"
    assert groups[id(step.b_proj.bias)] == groups[id(step.b_proj.weight)] == "mixer.vectors"
