"""The start of test-time training: fitted as Gated DeltaNet is, with the mini-batches of the layer.

The search takes the place of a rule for the step size: keys of a mini-batch that have much in common want smaller steps
than others, and the error on the calibration text shows how much smaller.
"""

from __future__ import annotations

from typing import Any

from deltanet_hf.mixers.ttt import TTT

from .calibration import LayerCalibration
from .gated_deltanet import start_gated_deltanet
from .rule_fit import RuleFit


def start_ttt(attention: Any, layer: TTT, calibration: LayerCalibration, fit_memory: bool = True) -> dict[str, Any]:
    """A rule of `START`; figures as for Gated DeltaNet."""
    if layer.inner_norm is not None:
        layer.inner_norm.reset_parameters()
    return start_gated_deltanet(attention, layer, calibration, fit_memory, RuleFit)
