"""The start of mixed heads: each branch starts as a layer of its own, from the teacher's attention of its heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deltanet_hf.mixers.attention.family_attention import kind_of
from deltanet_hf.mixers.mixed_heads import MixedHeads

from .calibration import LayerCalibration


def start_mixed_heads(
    rule_of: Callable[[str], Callable[..., dict[str, Any]]],
    attention: Any,
    layer: MixedHeads,
    calibration: LayerCalibration,
    fit_memory: bool = True,
) -> dict[str, Any]:
    """A rule of `START`; returns the figures of the linear branch, whose errors are those of its own heads' output.

    Args:
        rule_of: gives the rule of the mixer of a branch, by name.
    """
    figures: dict[str, Any] = {}
    for kind, branch in layer.branches.items():
        part = layer.part_of(attention, kind)
        figures |= rule_of(kind_of(branch).name)(part, branch, calibration, fit_memory)
    return figures
