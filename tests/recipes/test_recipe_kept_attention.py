"""`kept_qk`: query and key projections of softmax layers are frozen, or put back into the final model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deltanet_hf.errors import UserError
from deltanet_recipes.schema import Distil
from deltanet_recipes.training.adapters import merge_lora, train_for
from deltanet_recipes.training.kept_attention import query_key_parts, shared_rows_held
from deltanet_recipes.training.model_pair import load_student
from deltanet_recipes.training.pipeline import run
from support.tiny_models import tiny_student
from support.tiny_run import DISTIL, NO_CHECKPOINTS, SHAPE, make_workplace, tiny_recipe

CONVERTED = (0, 2)  # layer 1 keeps softmax attention
QK = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.q_norm", "self_attn.k_norm")


@pytest.fixture(scope="module", params=["qwen3", "phi3"])
def workplace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workplace(tmp_path_factory.mktemp(request.param), layers=CONVERTED, family=request.param)


def trained(workplace: Path, out: Path, *stages: dict[str, Any], **changes: Any) -> dict[str, torch.Tensor]:
    final = run(tiny_recipe(workplace, out / "run", *stages, log=NO_CHECKPOINTS, **changes))
    return load_file(final / "model.safetensors")


def split(weights: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors of queries and keys in layer 1, and all other tensors of its attention and its MLP."""
    own = {name: tensor for name, tensor in weights.items() if ".layers.1." in name and name.endswith("proj.weight")}
    norms = {name: tensor for name, tensor in weights.items() if ".layers.1.self_attn" in name and "norm" in name}
    own |= norms
    rows = SHAPE["hidden_size"] * 2  # as many key/value heads as query heads
    fused = "model.layers.1.self_attn.qkv_proj.weight"
    if fused in own:
        tensor = own.pop(fused)
        own |= {"self_attn.q_proj (fused)": tensor[:rows], "v (fused)": tensor[rows:]}
    held = {name: tensor for name, tensor in own.items() if any(part in name for part in QK)}
    return held, {name: tensor for name, tensor in own.items() if name not in held}


@pytest.mark.parametrize(
    ("train", "kept_qk"),
    [("lora", "train"), ("lora", "frozen"), ("lora", "restore"), ("full", "train"), ("full", "frozen")],
)
def test_queries_and_keys_end_where_they_should(workplace: Path, tmp_path: Path, train: str, kept_qk: str) -> None:
    stage = {**DISTIL, "tokens": 128 * 3, "train": train, "kept_qk": kept_qk}
    stage["optimizer"] = {**DISTIL["optimizer"], "name": "muon"}
    after = split(trained(workplace, tmp_path, stage))
    before = split(load_file(workplace / "student" / "model.safetensors"))
    assert before[0]
    assert len(before[1]) >= 4
    for name, tensor in before[0].items():
        same = torch.equal(tensor, after[0][name])
        norm_of_lora = "norm" in name and train == "lora"
        assert same == (kept_qk != "train" or norm_of_lora), name
    for name, tensor in before[1].items():
        assert not torch.equal(tensor, after[1][name]), name


def test_restored_projections_were_trained_until_the_end(workplace: Path, tmp_path: Path) -> None:
    stage = {**DISTIL, "tokens": 128 * 2, "train": "full", "kept_qk": "restore"}
    after, _ = split(trained(workplace, tmp_path, stage))
    before, _ = split(load_file(workplace / "student" / "model.safetensors"))
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    until, _ = split(load_file(tmp_path / "run" / "stages" / "00-distil.safetensors"))
    assert before.keys() == until.keys()
    assert not any(torch.equal(tensor, until[name]) for name, tensor in before.items())


def test_a_frozen_stage_leaves_the_next_one_free(workplace: Path, tmp_path: Path) -> None:
    first = {**DISTIL, "tokens": 128 * 2, "train": "full", "kept_qk": "frozen"}
    second = {**first, "kind": "long", "kept_qk": "train"}
    after, _ = split(trained(workplace, tmp_path, first, second))
    between, _ = split(load_file(tmp_path / "run" / "stages" / "00-distil.safetensors"))
    before, _ = split(load_file(workplace / "student" / "model.safetensors"))
    for name, tensor in before.items():
        assert torch.equal(tensor, between[name])
        assert not torch.equal(tensor, after[name])


@pytest.mark.parametrize("train", ["lora", "full"])
def test_an_adapter_on_a_shared_matrix_changes_the_values_only(tmp_path: Path, train: str) -> None:
    folder = make_workplace(tmp_path, layers=CONVERTED, family="phi3")
    student = load_student(str(folder / "student"), torch.float32)
    before = student.model.layers[1].self_attn.qkv_proj.weight.clone()
    stage = Distil(tokens=8192, train=train, kept_qk="frozen", optimizer={"name": "muon"})
    train_for(student, stage, seed=0)
    parameters = [p for p in student.parameters() if p.requires_grad]
    down = {name: p.clone() for name, p in student.named_parameters() if "lora_A" in name}
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with shared_rows_held(student, stage, sharded=False):
        for _ in range(2):  # an adapter's A has no gradient in the first step
            student(torch.arange(4, 40)[None]).logits.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not any(torch.equal(student.get_parameter(name), before_it) for name, before_it in down.items())
    merge_lora(student)
    moved = (student.model.layers[1].self_attn.qkv_proj.weight != before).any(1)
    assert not moved[:64].any()
    assert moved[64:].all()


def test_a_shared_matrix_that_cannot_be_held_is_one_clear_error() -> None:
    student = tiny_student("phi3", layers=CONVERTED)
    for decay, sharded in ((0.1, False), (0.0, True)):
        stage = Distil(tokens=8192, kept_qk="frozen", optimizer={"weight_decay": decay})
        said = r"^stages.distil.kept_qk: .*qkv_proj holds.*; set .*, or kept_qk to restore$"
        with pytest.raises(UserError, match=said), shared_rows_held(student, stage, sharded):
            pass


def test_kinds_that_stay_quadratic_keep_the_teachers_queries_and_keys() -> None:
    """All of their layers, beside those that are unchanged; windows do not."""
    found = {
        mixer: len(list(query_key_parts(tiny_student("llama", layers=(0, 2), mixer=mixer))))
        for mixer in ("fox", "window")
    }
    assert found == {"fox": 4 * 2, "window": 2 * 2}
