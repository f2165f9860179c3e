"""The start of Gated DeltaNet: the teacher's attention, and the new parameters fitted to its output."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from deltanet_hf.mixers.gated_deltanet import GatedDeltaNet

from .calibration import LayerCalibration
from .copy_weights import copy_attention
from .fit import GateFit, Samples, descend, draw_memory, relative_mse, search_memory


@dataclass(frozen=True)
class FitFigures:
    """What the fit found."""

    half_life: list[float]  # per state, in tokens; the mean over the calibration tokens
    beta: list[float]  # write strength per state, likewise
    search_mse: float  # relative MSE on the calibration text with constant decay and write strength
    fit_mse: float  # and after the fit


def start_gated_deltanet(
    attention: Any, layer: GatedDeltaNet, calibration: LayerCalibration, fit_memory: bool = True
) -> dict[str, Any]:
    """A rule of `START`; the figures are those of `FitFigures`.

    Args:
        attention: the teacher's attention of this layer, float32.
        layer: the new layer, float32; whatever it holds is overwritten, but for the convolution (an identity already).
        calibration: text that the layer is fitted on.
        fit_memory: False leaves decay and write strength at the start of a model trained from scratch, and fits only
            the output gate and the output norm.
    """
    copy_attention(attention, layer)
    if not fit_memory:
        draw_memory(layer, float(getattr(attention.config, "initializer_range", 0.02)))
    samples = Samples(attention, layer, calibration.hidden_states, calibration.kwargs)
    fit = GateFit(layer, samples.x, fit_memory)
    search_memory(fit, samples.search_part())
    found = relative_mse(fit, samples)
    descend(fit, samples)
    fit.fold()
    with torch.no_grad():
        gates = [fit.gates(sample.x)[:2] for sample in samples.kept]
    decay, strength = (torch.cat(parts).mean((0, 1)) for parts in zip(*gates, strict=True))
    figures = FitFigures(
        half_life=(math.log(2) / -decay).tolist(),
        beta=strength.tolist(),
        search_mse=found,
        fit_mse=relative_mse(fit, samples),
    )
    return dataclasses.asdict(figures)
