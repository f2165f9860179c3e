"""The teacher under a window with sinks: the same weights, with narrower masks, for weights of tokens by recall."""

from __future__ import annotations

from typing import Any

import torch

from deltanet_recipes.data.packing import Rows
from deltanet_recipes.training.layer_runner import LayerInputs

WINDOW, SINKS = 64, 4  # tokens that a query sees: the last 64, itself included, and the first 4 of its document


def windowed_inputs(entry: LayerInputs, rows: Rows, packed: bool) -> LayerInputs:
    """The inputs of a teacher's layers with masks that restrict every query to the window and the sinks.

    Only work on the device is done, so that a CUDA graph can record it.

    Args:
        entry: inputs of a model whose layers are all softmax attention, with SDPA: their masks are [R or 1, 1, L, L]
            bool or None (causal).
        packed: whether positions restart in the rows; otherwise all rows have the same.
    """
    positions = rows.position_ids if packed else rows.position_ids[:1]
    near = _near(positions)
    masks: dict[int, torch.Tensor] = {}  # most layers share one
    kwargs: list[dict[str, Any]] = []
    for given in entry.kwargs:
        mask = given.get("attention_mask")
        if id(mask) not in masks:
            masks[id(mask)] = near & (_causal(positions) if mask is None else mask)
        kwargs.append({**given, "attention_mask": masks[id(mask)]})
    return LayerInputs(entry.hidden, kwargs)


def _near(positions: torch.Tensor) -> torch.Tensor:
    """[R or 1, 1, L, L] bool: whether a key is near its query or a sink, by positions [R or 1, L]."""
    distance = positions[:, :, None] - positions[:, None, :]
    return ((distance < WINDOW) | (positions[:, None, :] < SINKS)).unsqueeze(1)


def _causal(positions: torch.Tensor) -> torch.Tensor:
    """[1, 1, L, L] bool: keys up to the query. transformers leaves this mask out where a row is one sequence."""
    places = torch.arange(positions.shape[1], device=positions.device)
    return (places[:, None] >= places)[None, None]
