"""Layers with mixed heads in training: linear heads are new weights, softmax heads and windows are the teacher's."""

from __future__ import annotations

from deltanet_recipes.schema import Align
from deltanet_recipes.schema_sections import Optimizer
from deltanet_recipes.training.adapters import lora_targets, train_for
from deltanet_recipes.training.model_pair import mixers
from deltanet_recipes.training.optim import parameter_groups
from support.tiny_models import mixed_mixture_table, mixed_table, tiny_mixture


def test_alignment_trains_the_linear_heads_only() -> None:
    student = tiny_mixture("llama", mixed_mixture_table())
    assert list(mixers(student)) == [0, 1, 3]
    train_for(student, Align(tokens=8192), seed=0)
    for name, parameter in student.named_parameters():
        taught = any(f".{part}_proj." in name for part in "qkvo")
        assert parameter.requires_grad == (".linear." in name and not taught), name
    assert mixers(tiny_mixture("llama", mixed_table("softmax", "window"))) == {}


def test_adapters_go_to_softmax_heads_and_windows() -> None:
    student = tiny_mixture("llama", mixed_mixture_table())
    targets = [name for name in lora_targets(student, "all") if ".self_attn" in name]
    projections = [f"{name}_proj" for name in "qkvo"]
    places = {"0.self_attn.softmax", "0.self_attn.linear", "1.self_attn.window", "2.self_attn", "3.self_attn.softmax"}
    places |= {name.split("layers.")[1].rpartition(".")[0] for name in targets if ".linear." in name}
    assert set(targets) == {f"model.layers.{place}.{name}" for place in places for name in projections}
    in_full = lora_targets(student, "attention", in_full=True)
    assert in_full == [name for name in targets if ".linear." not in name]


def test_linear_heads_have_the_rate_of_mixers() -> None:
    student = tiny_mixture("qwen3", mixed_mixture_table())
    groups = {id(p): group["name"] for group in parameter_groups(student, Optimizer()) for p in group["params"]}
    for name, parameter in student.named_parameters():
        taught = any(f".{part}" in name for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"))
        assert groups[id(parameter)].startswith("mixer" if ".linear." in name and not taught else "rest"), name
