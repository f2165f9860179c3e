"""The start of Gated DeltaNet: the teacher's weights; the new parameters are fitted to the attention's output."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from deltanet_hf.mixers.gated_deltanet import GatedDeltaNet

from .calibration import LayerCalibration
from .copy_weights import copy_attention
from .gate_fit import GateFit, descend, draw_memory, relative_mse, search_memory
from .key_offset import choose_key_offset
from .samples import Samples
from .turns import others_may_run


@dataclass(frozen=True)
class FitFigures:
    """The results of the fit; means are over the calibration tokens, errors are relative MSE on them."""

    half_life: list[float]  # mean half-life per state, in tokens; empty without decay
    beta: list[float]  # mean write strength per state; empty in rules without one
    search_mse: float  # error with constant decay and write strength, before the fit
    fit_mse: float  # error after the fit
    k_offset: list[float] = field(default_factory=list)  # per state, the share of the mean key that is subtracted


def start_gated_deltanet(
    attention: Any,
    layer: GatedDeltaNet,
    calibration: LayerCalibration,
    fit_memory: bool = True,
    kind_of_fit: type[GateFit] = GateFit,
) -> dict[str, Any]:
    """A rule of `START`, of Gated DeltaNet and the rules that derive from it; returns the fields of `FitFigures`.

    Args:
        attention: the teacher's attention of this layer, float32.
        layer: the new layer, float32. Its convolution is an identity already; everything else is overwritten.
        calibration: the inputs on which the layer is fitted.
        fit_memory: False starts decay and write strength as in a model trained from scratch, and fits only the output
            gate and the output norm.
        kind_of_fit: the class of the fit, which computes the layer's rule.
    """
    copy_attention(attention, layer)
    if not fit_memory:
        draw_memory(layer, float(getattr(attention.config, "initializer_range", 0.02)))
    with others_may_run():
        samples = Samples(attention, layer, calibration.hidden_states, calibration.kwargs)
        layer.adapt_to(samples.kept[0].q, samples.kept[0].k)
    fit = kind_of_fit(layer, samples, fit_memory)
    with others_may_run():
        shares = [] if layer.k_offset is None else choose_key_offset(layer, fit, samples)
        search_memory(fit, samples.search_part())
        found = relative_mse(fit, samples)
        descend(fit, samples)
    fit.fold()
    with torch.no_grad():
        gates = [fit.gates(sample.x)[:2] for sample in samples.kept]
    decay, strength = (torch.cat(parts).mean((0, 1)) for parts in zip(*gates, strict=True))
    figures = FitFigures(
        half_life=[] if layer.decay is None else (math.log(2) / -decay).tolist(),
        beta=[] if layer.b_proj is None else strength.tolist(),
        search_mse=found,
        fit_mse=relative_mse(fit, samples),
        k_offset=shares,
    )
    return dataclasses.asdict(figures)
