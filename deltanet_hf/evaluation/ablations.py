"""Ablations: a part of a model is taken away, to see what goes through it. `baselines.switch_off_linear` is another.

A ablation changes the model in place and needs no training.
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
        branch.share = fixed
    return model
