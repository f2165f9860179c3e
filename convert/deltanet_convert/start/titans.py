"""The start of Titans' memory: fitted as Gated DeltaNet is, beginning with hardly any momentum."""

from __future__ import annotations

from typing import Any

from deltanet_hf.mixers.titans import Titans

from .calibration import LayerCalibration
from .gated_deltanet import start_gated_deltanet
from .rule_fit import RuleFit


def start_titans(
    attention: Any, layer: Titans, calibration: LayerCalibration, fit_memory: bool = True
) -> dict[str, Any]:
    """A rule of `START`; figures as for Gated DeltaNet."""
    layer.start_momentum()
    return start_gated_deltanet(attention, layer, calibration, fit_memory, RuleFit)
