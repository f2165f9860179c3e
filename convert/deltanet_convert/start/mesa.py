"""The start of the Mesa layer: fitted as Gated DeltaNet is, through conjugate gradients.

Least squares depend on the write weight and the ridge through their ratio only. So the search over write strengths at
a ridge of 1 is one over ridges too: a strength of 0.01 is a ridge of 100, with which the layer is close to gated linear
attention. Each head takes the better one, and the ridge of every channel is fitted from there.
"""

from __future__ import annotations

from typing import Any

from deltanet_hf.mixers.mesa import Mesa

from .calibration import LayerCalibration
from .gated_deltanet import start_gated_deltanet
from .rule_fit import RuleFit


def start_mesa(attention: Any, layer: Mesa, calibration: LayerCalibration, fit_memory: bool = True) -> dict[str, Any]:
    """A rule of `START`; figures as for Gated DeltaNet."""
    layer.mesa_ridge.reset_parameters()
    return start_gated_deltanet(attention, layer, calibration, fit_memory, RuleFit)
