"""The start of the rules with a decay per channel: a fitted rule with a decay per head, in all channels alike.

A layer with one decay and one strength per head is fitted as a Gated DeltaNet is (for gated linear attention without
erasing). Its weights are then written into the layer so that it computes the same function; the channels part during
training.
"""

from __future__ import annotations

from typing import Any

import torch

from deltanet_hf.mixers.gated_deltanet import GatedDeltaNet
from deltanet_hf.mixers.gated_linear import GatedLinear
from deltanet_hf.mixers.gdn2 import GatedDeltaNet2
from deltanet_hf.mixers.gla import GatedLinearAttention
from deltanet_hf.mixers.kda import KimiDeltaAttention

from .calibration import LayerCalibration
from .gated_deltanet import start_gated_deltanet


def start_kda(
    attention: Any, layer: KimiDeltaAttention, calibration: LayerCalibration, fit_memory: bool = True
) -> dict[str, Any]:
    """A rule of `START`: the fitted Gated DeltaNet exactly; returns its figures."""
    return _start(attention, layer, calibration, fit_memory, GatedDeltaNet)[1]


def start_gla(
    attention: Any, layer: GatedLinearAttention, calibration: LayerCalibration, fit_memory: bool = True
) -> dict[str, Any]:
    """A rule of `START`: the fitted gated linear attention with a decay per head exactly; returns its figures."""
    return _start(attention, layer, calibration, fit_memory, GatedLinear)[1]


def start_gdn2(
    attention: Any, layer: GatedDeltaNet2, calibration: LayerCalibration, fit_memory: bool = True
) -> dict[str, Any]:
    """A rule of `START`: the fitted Gated DeltaNet exactly; returns its figures."""
    scalar, figures = _start(attention, layer, calibration, fit_memory, GatedDeltaNet)
    layer.start_strengths(scalar)
    return figures


def _start(
    attention: Any,
    layer: KimiDeltaAttention,
    calibration: LayerCalibration,
    fit_memory: bool,
    kind: type[GatedDeltaNet],
) -> tuple[GatedDeltaNet, dict[str, Any]]:
    """Fit a layer of `kind`, copy to `layer` what both have, and its decay; returns that layer and the figures."""
    scalar: Any = kind.from_attention(attention, attention.config, layer.layer_idx, layer.settings)
    scalar.requires_grad_(False)
    figures = start_gated_deltanet(attention, scalar, calibration, fit_memory)
    with torch.no_grad():
        own = dict(layer.named_parameters())
        for name, value in scalar.named_parameters():
            if name in own and not name.startswith("decay."):
                own[name].copy_(value)
    layer.start_decay(scalar)
    return scalar, figures
