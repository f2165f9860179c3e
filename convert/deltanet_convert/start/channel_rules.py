"""The start of the rules with a decay per channel: a fitted rule with a decay per head, in all channels alike.

A layer with one decay and one strength per head is fitted as a Gated DeltaNet is (for gated linear attention without
erasing). Its weights are then written into the layer so that it computes the same function; the channels part during
training.
"""

from __future__ import annotations

from typing import Any

from deltanet_hf.mixers.gated_deltanet import GatedDeltaNet
from deltanet_hf.mixers.gated_linear import GatedLinear
from deltanet_hf.mixers.layer import ChannelRule

from .calibration import LayerCalibration
from .fitted import start_fitted


def start_channel_rule(
    attention: Any, layer: ChannelRule, calibration: LayerCalibration, fit_memory: bool = True
) -> dict[str, Any]:
    """A rule of `START`: the fitted layer with a decay per head exactly; returns its figures."""
    kind = GatedLinear if layer.erase == "off" else GatedDeltaNet
    scalar: Any = kind.from_attention(attention, attention.config, layer.layer_idx, layer.settings)
    scalar.requires_grad_(False)
    figures = start_fitted(attention, scalar, calibration, fit_memory)
    layer.take_over(scalar)
    return figures
