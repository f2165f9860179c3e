"""Counts which weights of a converted layer are the teacher's, by names and shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deltanet_hf.mixers.layer.layer_kind import branches_of

ATTENTION = "self_attn."


def count_origins(
    before: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], attention: Any, new: Any
) -> dict[str, int]:
    """Numbers of parameters under "copied", "expanded", "created" and "dropped", as `LayerPlan` has them.

    Args:
        before: the teacher's decoder layer, by names within the layer.
        shapes: the converted layer's tensors, likewise.
        attention, new: the teacher's attention and the layer that takes its place.
    """
    branches = branches_of(new)
    if "" in branches:  # one kind
        return _counts({name: tuple(tensor.shape) for name, tensor in before.items()}, shapes)
    first = next(iter(branches))
    origins = {name: tuple(tensor.shape) for name, tensor in before.items() if not name.startswith(ATTENTION)}
    counts = _counts(origins, {name: shape for name, shape in shapes.items() if not name.startswith(ATTENTION)})
    for kind in branches:
        part = new.part_of(attention, kind)
        prefix = f"{ATTENTION}{kind}."
        own = {ATTENTION + n.removeprefix(prefix): shape for n, shape in shapes.items() if n.startswith(prefix)}
        had = {f"{ATTENTION}{name}": tuple(tensor.shape) for name, tensor in part.state_dict().items()}
        if kind != first:  # what is not split is one tensor of the teacher, whichever branches have it
            had = {name: shape for name, shape in had.items() if name in own or shape != tuple(before[name].shape)}
        counts = {name: counts[name] + number for name, number in _counts(had, own).items()}
    return counts


def _counts(before: Mapping[str, tuple[int, ...]], after: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    counts = {"copied": 0, "expanded": 0, "created": 0}
    sources = {name: _source(name, before) for name in after}
    for name, shape in after.items():
        source = sources[name]
        kind = "created" if source not in before else "copied" if before[source] == shape else "expanded"
        counts[kind] += torch.Size(shape).numel()
    dropped = sum(torch.Size(shape).numel() for name, shape in before.items() if name not in sources.values())
    return {**counts, "dropped": dropped}


def _source(name: str, before: Mapping[str, tuple[int, ...]]) -> str:
    """Name of the teacher's tensor that an output tensor comes from: the same, or the fused projection's (phi3)."""
    name = name.replace("window_branch.learned_sinks", "sinks")
    if name not in before:
        for part in ("q_proj", "k_proj", "v_proj"):
            name = name.replace(f"{ATTENTION}{part}.", f"{ATTENTION}qkv_proj.")
    return name
