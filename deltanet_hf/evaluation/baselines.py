"""Changes to a converted model that a report measures beside it; none needs training.

Ablations (`switch_off_...`) take a part of a model away, to see what goes through it; the others show what a model was
before its training, and what a conversion without a fitted start begins with. The window + sinks
baseline is a kind of layer (`deltanet_hf/mixers/window.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.attention.family_attention import kind_of
from deltanet_hf.mixers.layer.layer_kind import branches_of
from deltanet_hf.models.layers import SOFTMAX, layers_with_states


def linear_layers(model: PreTrainedModel) -> list[Any]:
    """The layers of a converted model with a recurrent state, in order. Raises UserError if there are none."""
    layers = layers_with_states(model)
    if not layers:
        raise UserError(
            f"{type(model).__name__}: no layer with a recurrent state; this baseline needs a converted model"
        )
    return layers


def switch_off_linear(model: PreTrainedModel) -> PreTrainedModel:
    """Make every layer with a recurrent state contribute exactly zero, in place; its state and cache still advance."""

    def silence(module: nn.Module, inputs: tuple, output: tuple[Tensor, None]) -> tuple[Tensor, None]:
        return torch.zeros_like(output[0]), None

    for layer in linear_layers(model):
        layer.register_forward_hook(silence)
    return model


def switch_off_softmax(model: PreTrainedModel) -> PreTrainedModel:
    """Make the teacher's softmax attention, in whole layers and in mixed heads, contribute exactly zero.

    Raises UserError if there is none.
    """
    branches = (branch for layer in model.model.layers for branch in branches_of(layer.self_attn).values())
    found: list[nn.Module] = [branch for branch in branches if kind_of(branch).name == SOFTMAX]
    if not found:
        raise UserError(f"{type(model).__name__}: no layer with softmax attention; this ablation needs one")

    def silence(module: nn.Module, inputs: tuple, output: tuple) -> tuple:
        return torch.zeros_like(output[0]), *output[1:]

    for attention in found:
        attention.register_forward_hook(silence)
    return model


def switch_off_window(model: PreTrainedModel) -> PreTrainedModel:
    """Leave out the window of every layer that has one beside its state. UserError if there is none."""
    return _fix_share(model, 1.0)


def switch_off_state(model: PreTrainedModel) -> PreTrainedModel:
    """Leave out the state of every layer that has a window beside it. UserError if there is none."""
    return _fix_share(model, 0.0)


def _fix_share(model: PreTrainedModel, share: float) -> PreTrainedModel:
    """Give the state this share of the output, at every token and head."""
    branches: list[Any] = [part for layer in layers_with_states(model) for part, _ in layer.softmax_parts]
    if not branches:
        raise UserError(f"{type(model).__name__}: no layer with a window beside its state; this ablation needs one")

    def fixed(logits: Tensor, lse: Tensor, numbers: Tensor) -> Tensor:
        return torch.full_like(lse, share)

    for branch in branches:
        branch.mixing_gate = fixed
    return model


@torch.no_grad()
def from_scratch_start(student: PreTrainedModel, teacher: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Turn `student` into an unfitted start of its own architecture, in place.

    It is `untrained`, and everything else has the start of a mixer trained from scratch, with no fit to the teacher's
    attention. A converter without calibration writes the same.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in linear_layers(student):
        layer.start_from_scratch(float(getattr(student.config, "initializer_range", 0.02)), generator)
    return untrained(student, teacher)


@torch.no_grad()
def untrained(student: PreTrainedModel, teacher: PreTrainedModel) -> PreTrainedModel:
    """Give `student` every weight that the teacher has, in place.

    Key and value heads are repeated where the student has one per query head. A student of softmax heads and windows is
    as before its training; the order of its keys and the bits of its cache stay.
    """
    source = _teacher_weights(student, teacher)
    for name, target in student.state_dict().items():
        if name in source:
            target.copy_(_repeat_heads(*source[name], target))
    return student


def _teacher_weights(student: PreTrainedModel, teacher: PreTrainedModel) -> dict[str, tuple[Tensor, int]]:
    """The teacher's weights by the student's names, and the number of key/value heads that they are of."""
    config, layers = teacher.config, teacher.model.layers
    groups, heads = config.num_attention_heads // config.num_key_value_heads, config.num_key_value_heads
    found = {name: (weight, heads) for name, weight in _split_fused(teacher.state_dict(), groups).items()}
    for index, layer in enumerate(student.model.layers):
        attention: Any = layer.self_attn
        for branch in filter(None, branches_of(attention)):  # a layer of one kind has the teacher's names
            part: Any = attention.part_of(layers[index].self_attn, branch)
            prefix, own = f"model.layers.{index}.self_attn.{branch}.", part.config.num_key_value_heads
            found |= {prefix + name: (weight, own) for name, weight in _split_fused(part.state_dict(), groups).items()}
    return found


def _repeat_heads(weight: Tensor, heads: int, target: Tensor) -> Tensor:
    """Repeat head blocks along the rows: head g of the target reads the teacher's head g // repeats."""
    if weight.shape == target.shape:
        return weight
    repeats = target.shape[0] // weight.shape[0]
    return weight.unflatten(0, (heads, -1)).repeat_interleave(repeats, dim=0).flatten(0, 1)


def _split_fused(weights: Mapping[str, Tensor], groups: int) -> dict[str, Tensor]:
    """Weights by name; the parts of a fused `qkv_proj` also as q_proj, k_proj and v_proj."""
    state: dict[str, Tensor] = {}
    for name, weight in weights.items():
        state[name] = weight
        if "qkv_proj" in name:
            head_rows = weight.shape[0] // (groups + 2)
            for part, rows in zip("qkv", weight.split([groups * head_rows, head_rows, head_rows]), strict=True):
                state[name.replace("qkv_proj", f"{part}_proj")] = rows
    return state
