"""Changes to a converted model that a report measures beside it; none needs training.

Ablations (`switch_off_...`) take a part of a model away, to see what goes through it; `untrained` shows what it was
before its training. The window + sinks baseline is a kind of layer (`deltanet_hf/mixers/window.py`).
"""

from __future__ import annotations

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
def untrained(student: PreTrainedModel, teacher: PreTrainedModel) -> PreTrainedModel:
    """Give a student of softmax heads and windows the teacher's weights, in place.

    It is then as before its training; the order of its keys and the bits of its cache stay.
    """
    source = dict(teacher.state_dict())
    for index, layer in enumerate(student.model.layers):
        attention: Any = layer.self_attn
        for branch in filter(None, branches_of(attention)):  # a layer of one kind has the teacher's names
            part = attention.part_of(teacher.model.layers[index].self_attn, branch)
            source |= {f"model.layers.{index}.self_attn.{branch}.{name}": w for name, w in part.state_dict().items()}
    for name, target in student.state_dict().items():
        if name in source:
            target.copy_(source[name])
    return student
