"""Layers without values and their inputs, for tests of start values."""

from __future__ import annotations

from typing import Any

import torch

from deltanet_hf.mixers.gated_deltanet import GatedDeltaNet
from deltanet_hf.mixers.layer.parts import Part
from support.tiny_models import tiny_student


def layer_inputs(
    teacher: Any, index: int, sequences: int = 2, tokens: int = 24, ids: torch.Tensor | None = None
) -> tuple[Any, torch.Tensor, dict[str, Any]]:
    """One layer's attention, its inputs [n, T, hidden] and its other arguments, as the converter gets them.

    Args:
        ids: token ids [n, T]; None for random ones.
    """
    attention = teacher.model.layers[index].self_attn
    seen: list[dict[str, Any]] = []
    handle = attention.register_forward_pre_hook(lambda module, args, kwargs: seen.append({**kwargs}), with_kwargs=True)
    if ids is None:
        ids = torch.randint(3, 97, (sequences, tokens), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        for row in ids:
            teacher(row[None], use_cache=False)
    handle.remove()
    states = torch.cat([kwargs.pop("hidden_states") for kwargs in seen])
    return attention, states, {name: value for name, value in seen[0].items() if value is not None}


def blank_layer(model_type: str, profile: str, index: int, **changes: Any) -> GatedDeltaNet:
    """A converted layer whose copied parameters are NaN, as the converter passes it to a start rule."""
    layer = tiny_student(model_type, profile, **changes).model.layers[index].self_attn.requires_grad_(False)
    for parameter in layer.parameters():
        parameter.fill_(torch.nan)
    for module in layer.modules():
        if isinstance(module, Part):
            module.reset_parameters()
    return layer
