"""The start of the delta family: the teacher's weights; the new parameters are fitted to the attention's output.

What single rules have besides decay and write strength:

- Mesa: least squares depend on the write weight and the ridge through their ratio only. So the search over write
  strengths at a ridge of 1 is one over ridges too: a strength of 0.01 is a ridge of 100, with which the layer is close
  to gated linear attention. Each head takes the better one, and the ridge of every channel is fitted from there.
- Test-time training: the search takes the place of a rule for the step size. Keys of a mini-batch that have much in
  common want smaller steps than others, and the error on the calibration text shows how much smaller.
- Titans: the fit begins with hardly any momentum.
- Gated DeltaProduct: the fit ignores the further writes, which begin close to zero; its result does not depend on their
  number.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from deltanet_hf.mixers.gated_deltanet import GatedDeltaNet
from deltanet_hf.mixers.gated_linear import GatedLinear
from deltanet_hf.mixers.layer import ChannelRule, DeltaRule

from .copy_weights import copy_attention
from .gate_fit import GateFit, descend, relative_mse, search_memory
from .key_offset import choose_key_offset
from .samples import LayerCalibration, Samples


@dataclass(frozen=True)
class FitFigures:
    """The results of the fit; means are over the calibration tokens, errors are relative MSE on them."""

    half_life: list[float]  # mean half-life per state, in tokens; empty without decay
    beta: list[float]  # mean write strength per state; empty in rules without one
    search_mse: float  # error with constant decay and write strength, before the fit
    fit_mse: float  # error after the fit
    k_offset: list[float] = field(default_factory=list)  # per state, the share of the mean key that is subtracted


def start_fitted(attention: Any, layer: DeltaRule, calibration: LayerCalibration) -> dict[str, Any]:
    """A rule of `START`; returns the fields of `FitFigures`.

    Args:
        attention: the teacher's attention of this layer, float32.
        layer: the new layer, float32. Its convolution is an identity already; everything else is overwritten.
        calibration: the inputs on which the layer is fitted.
    """
    copy_attention(attention, layer)
    layer.before_fit()
    samples = Samples(attention, layer, calibration.hidden_states, calibration.kwargs)
    layer.adapt_to(samples.kept[0].q, samples.kept[0].k)
    fit = GateFit(layer, samples)
    shares = [] if layer.k_offset is None else choose_key_offset(layer, fit, samples)
    search_memory(fit, samples.search_part())
    found = relative_mse(fit, samples)
    descend(fit, samples)
    if fit.share is not None and fit.share.branch[0].delayed:  # elsewhere it was not measured
        fit.share.slow()
    fit.fold()
    with torch.no_grad():
        gates = [fit.gates(sample.x)[:2] for sample in samples.kept]
    decay, strength = (torch.cat(parts).mean((0, 1)) for parts in zip(*gates, strict=True))
    figures = FitFigures(
        half_life=[] if layer.decays == "never" else (math.log(2) / -decay).tolist(),
        beta=[] if layer.strengths == "one" else strength.tolist(),
        search_mse=found,
        fit_mse=relative_mse(fit, samples),
        k_offset=shares,
    )
    layer.after_fit()
    return dataclasses.asdict(figures)


def start_channel_rule(attention: Any, layer: ChannelRule, calibration: LayerCalibration) -> dict[str, Any]:
    """A rule of `START` for a decay per channel; returns the figures of the layer that is fitted.

    That is a Gated DeltaNet (gated linear attention for a rule without erasing), with one decay and one strength per
    head. Its weights are written into `layer` so that it computes the same function; channels part in training.
    """
    kind = GatedLinear if layer.erase == "off" else GatedDeltaNet
    scalar: Any = kind.from_attention(attention, attention.config, layer.layer_idx, layer.settings)
    scalar.requires_grad_(False)
    figures = start_fitted(attention, scalar, calibration)
    layer.take_over(scalar)
    return figures
