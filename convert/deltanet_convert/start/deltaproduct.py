"""The start of Gated DeltaProduct: a fitted Gated DeltaNet whose further writes are close to zero."""

from __future__ import annotations

from typing import Any

from deltanet_hf.mixers.deltaproduct import DeltaProduct

from .calibration import LayerCalibration
from .gated_deltanet import start_gated_deltanet


def start_deltaproduct(
    attention: Any, layer: DeltaProduct, calibration: LayerCalibration, fit_memory: bool = True
) -> dict[str, Any]:
    """A rule of `START`. The fit ignores the further writes; its result does not depend on their number."""
    figures = start_gated_deltanet(attention, layer, calibration, fit_memory)
    write: Any
    for write in layer.householder:
        write.start(layer.k_proj, layer.max_strength)
    return figures
