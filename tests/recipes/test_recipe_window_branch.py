"""Rates and cache bits of layers with a window beside their state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from deltanet_hf.models.cache_bits import cache_bits_of, set_cache_bits
from deltanet_recipes.schema import Align, Distil
from deltanet_recipes.schema_sections import Optimizer
from deltanet_recipes.training import stages
from deltanet_recipes.training.logbook import read_log
from deltanet_recipes.training.model_pair import load_student, mixers
from deltanet_recipes.training.optim import parameter_groups, unset_rates
from deltanet_recipes.training.pipeline import run
from support.tiny_models import tiny_student
from support.tiny_run import ALIGN, DISTIL, make_workplace, tiny_recipe


def recipe(workplace: Path, out: Path, *given: dict[str, Any]) -> Any:
    return tiny_recipe(workplace, out / "run", *given)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_rates_of_their_own(workplace: Path, name: Any) -> None:
    student = tiny_student("llama", window=5)
    mixer = mixers(student)[0]
    mixer.window_branch.share_proj = nn.Linear(32, 20)  # a matrix, as of models with many heads

    def groups(**rates: float) -> dict[int, tuple[str, float, bool]]:
        settings = Optimizer(name=name, mixer_lr=1e-3, rest_lr=1e-4, weight_decay=0.1, **rates)
        found = parameter_groups(student, settings)
        assert sum(len(group["params"]) for group in found) == len(list(student.parameters()))
        assert all(group["weight_decay"] == 0 for group in found if "share" in group["name"])
        return {id(p): (group["name"], group["peak_lr"], group["muon"]) for group in found for p in group["params"]}

    plain, own = groups(), groups(projection_lr=1e-5, share_lr=1e-2)
    muon = name == "muon"
    for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
        weight = id(getattr(mixer, projection).weight)
        assert plain[weight] == ("rest", 1e-4, muon)
        assert own[weight] == ("projection", 1e-5, muon)
    share = mixer.window_branch.share_proj
    assert plain[id(share.weight)] == ("mixer", 1e-3, muon)
    assert own[id(share.weight)] == own[id(share.bias)] == ("share.vectors", 1e-2, False)
    for parameter in (mixer.g_proj.weight, mixer.a_proj.weight, student.model.layers[0].mlp.up_proj.weight):
        assert plain[id(parameter)] == own[id(parameter)]


def test_stages_without_a_rate_for_the_share_are_named() -> None:
    student = tiny_student("llama", window=5)
    given: list[Any] = [Align(tokens=8192), Distil(tokens=65536, optimizer=Optimizer(share_lr=1e-2))]
    said = unset_rates(given, student)
    assert said.startswith("align: the student has windows and begins near its teacher")
    assert unset_rates(given[1:], student) is None
    assert unset_rates(given, tiny_student("llama")) is None


def test_a_rate_of_zero_keeps_the_projections(workplace: Path, tmp_path: Path) -> None:
    before = load_student(str(workplace / "student")).state_dict()
    rates = {"optimizer": {"name": "muon", "mixer_lr": 3e-3, "rest_lr": 1e-3, "projection_lr": 0.0}}
    final = run(recipe(workplace, tmp_path, {**ALIGN, "tokens": 256, **rates}))
    for key, tensor in load_student(str(final)).state_dict().items():
        projection = any(f".self_attn.{name}_proj" in key for name in "qkvo")
        assert torch.equal(tensor, before[key]) == (projection or ".self_attn." not in key), key


def test_a_stage_trains_through_a_quantised_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `cache_bits: 4` the student's held-out KL is that of its rounding, in this stage only: its configuration
    goes on saying what it said."""
    rows: list[Any] = []
    evaluate = stages.StageRun._evaluate
    monkeypatch.setattr(
        stages.StageRun, "_evaluate", lambda self, *rest: rows.append(self.held_out) or evaluate(self, *rest)
    )
    make_workplace(tmp_path, layers=(0, 1), window=40)
    set_cache_bits(load_student(str(tmp_path / "student")), 8).save_pretrained(tmp_path / "student")
    errors = {}
    for bits in (16, 4):
        stage = {**DISTIL, "tokens": 256, "cache_bits": bits, "optimizer": {"mixer_lr": 1e-5, "rest_lr": 1e-5}}
        final = run(tiny_recipe(tmp_path, tmp_path / f"{bits}", stage, data={"isolate_documents": False}))
        assert cache_bits_of(load_student(str(final))) == 8
        errors[bits] = read_log(tmp_path / f"{bits}")[0]["held_out.kl"]
        student = set_cache_bits(load_student(str(tmp_path / "student"), torch.float32), bits)
        assert errors[bits] == pytest.approx(divergence(tmp_path / "teacher", student, rows[0]), rel=1e-3)
    assert errors[4] != pytest.approx(errors[16], rel=5e-3)  # so that the comparison above tells them apart


@torch.no_grad()
def divergence(teacher: Path, student: Any, rows: Any) -> float:
    """KL of a student from a teacher in a folder, in nats, mean over the scored tokens of rows without boundaries."""
    models = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32), student.eval()
    want, got = (model(rows.input_ids, use_cache=False).logits.double().log_softmax(-1) for model in models)
    kl = (want.exp() * (want - got)).sum(-1)
    return float(kl[rows.labels >= 0].mean())
