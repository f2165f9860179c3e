"""Starts without a fit; they ignore the calibration data and return no figures."""

from __future__ import annotations

from typing import Any

import torch

from deltanet_hf.mixers import Mixer
from deltanet_hf.mixers.attention.family_attention import kind_of

from .copy_weights import copy_attention
from .samples import LayerCalibration


def start_from_scratch(attention: Any, layer: Mixer, calibration: LayerCalibration) -> dict[str, Any]:
    """The rule of mixers without a row in `START`: the teacher's projections, all else as in training from scratch."""
    layer.start_from_scratch(_spread(attention))
    copy_attention(attention, layer)
    return {}


@torch.no_grad()
def start_unchanged(attention: Any, layer: Any, calibration: LayerCalibration) -> dict[str, Any]:
    """The rule of kinds that are the teacher's attention: its weights, and new parts that change nothing yet."""
    kind_of(layer).start_neutral(_spread(attention))
    layer.load_state_dict({**layer.state_dict(), **attention.state_dict()})
    return {}


def _spread(attention: Any) -> float:
    """The standard deviation of the family's projections in training from scratch."""
    return float(getattr(attention.config, "initializer_range", 0.02))
