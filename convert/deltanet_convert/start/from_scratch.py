"""The start without a fit: the teacher's projections, and everything else as in a model trained from scratch."""

from __future__ import annotations

from typing import Any

from deltanet_hf.mixers import Mixer

from .calibration import LayerCalibration
from .copy_weights import copy_attention


def start_from_scratch(
    attention: Any, layer: Mixer, calibration: LayerCalibration, fit_memory: bool = True
) -> dict[str, Any]:
    """The rule of mixers without a row in `START`; it ignores the calibration data and returns no figures."""
    layer.start_from_scratch(float(getattr(attention.config, "initializer_range", 0.02)))
    copy_attention(attention, layer)
    return {}
