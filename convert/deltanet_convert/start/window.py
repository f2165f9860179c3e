"""The start of a window: the unchanged weights of the teacher's attention."""

from __future__ import annotations

from typing import Any

from torch import nn

from .calibration import LayerCalibration


def start_window(
    attention: Any, layer: nn.Module, calibration: LayerCalibration, fit_memory: bool = True
) -> dict[str, Any]:
    """A rule of `START`; nothing is fitted, and there are no figures."""
    layer.load_state_dict(attention.state_dict())
    return {}
