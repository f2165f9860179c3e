"""Layers without values and their inputs, for tests of start values."""

from __future__ import annotations

from typing import Any

import torch

from deltanet_convert.start import start_rule
from deltanet_convert.start.samples import LayerCalibration
from deltanet_hf.mixers.gated_deltanet import GatedDeltaNet
from deltanet_hf.mixers.layer.parts import Part
from support.tiny_models import tiny_student, tiny_teacher


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


def started(
    model_type: str, profile: str = "faithful", index: int = 0, **changes: Any
) -> tuple[Any, Any, Any, Any, Any]:
    """The teacher's attention, the started layer, the attention's inputs and other arguments, and the figures."""
    attention, states, kwargs = layer_inputs(tiny_teacher(model_type, attn_implementation="eager"), index)
    layer = blank_layer(model_type, profile, index, **changes)
    return attention, layer, states, kwargs, start_rule(layer.name)(attention, layer, LayerCalibration(states, kwargs))


def relative_mse(attention: Any, layer: Any, states: torch.Tensor, kwargs: dict[str, Any]) -> float:
    """Of the layer's output from the teacher's."""
    want = torch.cat([attention(hidden_states=x, **kwargs)[0] for x in states.split(1)])
    return float((layer(states, **kwargs)[0] - want).square().sum() / want.square().sum())
