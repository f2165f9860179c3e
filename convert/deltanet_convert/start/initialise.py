"""Start values of one converted layer: the teacher's attention, and new parameters fitted to its output."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltanet_hf.mixers.deltaproduct import HouseholderStep
from deltanet_hf.mixers.gated_deltanet import GatedDeltaNet

from .copy_weights import copy_attention
from .fit import GateFit, Samples, descend, draw_memory, relative_mse, search_memory


@dataclass(frozen=True)
class LayerCalibration:
    """What the teacher's attention gets on calibration text."""

    hidden_states: Tensor  # [n, T, hidden] float32, after the layer's input norm
    kwargs: dict[str, Any]  # the attention's other arguments, for a batch of one: position_embeddings, attention_mask


@dataclass(frozen=True)
class LayerFigures:
    """What the fit found; per state, means over the calibration tokens."""

    half_life: list[float]  # of the state, in tokens
    beta: list[float]  # write strength
    search_mse: float  # relative MSE on the calibration text with constant decay and write strength
    fit_mse: float  # and after the fit


def initialise_layer(
    attention: Any, layer: GatedDeltaNet, calibration: LayerCalibration, fit_memory: bool = True
) -> LayerFigures:
    """Gives every parameter of `layer` its start value. Uses no random numbers but the global generator's.

    Args:
        attention: the teacher's attention of this layer, float32.
        layer: the new layer, float32; whatever it holds is overwritten, but for the convolution (an identity already).
        calibration: text the layer is fitted on.
        fit_memory: False leaves decay and write strength at the start of a model trained from scratch, and fits only
            the output gate and the output norm (an ablation).

    Further Householder steps are added to the fitted layer, so that it is the same for any number of them; the figures
    are of the fitted layer.
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
    for module in layer.modules():
        if isinstance(module, HouseholderStep):
            module.start(layer.k_proj)
    with torch.no_grad():
        gates = [fit.gates(sample.x)[:2] for sample in samples.kept]
    decay, strength = (torch.cat(parts).mean((0, 1)) for parts in zip(*gates, strict=True))
    return LayerFigures(
        half_life=(math.log(2) / -decay).tolist(),
        beta=strength.tolist(),
        search_mse=found,
        fit_mse=relative_mse(fit, samples),
    )
