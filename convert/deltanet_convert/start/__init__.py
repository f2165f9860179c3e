"""Start values of converted layers: one rule per mixer, one row here.

A rule gives every parameter of the new layer its start value. A mixer with a state and without a row starts with the
teacher's projections, and with everything else as in a model trained from scratch; any other kind starts as the
teacher's attention.

    fitted.py           the rules of the delta family: decay, write strength, output gate and norm are fitted (a decay
                        per channel as one per head, copied to all channels), by
    gate_fit.py         search and Adam through the rule itself, in the coordinates of
    components.py       the principal components of the layer's input, on
    samples.py          the teacher's inputs and outputs;
    key_offset.py       chooses how far keys are centred,
    share_fit.py        begins the share of the state beside a window
    unfitted.py         kinds that are the teacher's attention, and mixers without a row
    copy_weights.py     the teacher's projections and norms
    key_order.py        which channels of keys get 5 and 3 of the 4 bits
    norm_fit.py         q/k norms for softmax layers that have none (`norm_config.py`: for which models)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deltanet_hf.mixers import MIXERS
from deltanet_hf.mixers.attention.family_attention import kind_of
from deltanet_hf.mixers.mixed_heads import MixedHeads

from .fitted import start_channel_rule, start_fitted
from .samples import LayerCalibration
from .unfitted import start_from_scratch, start_unchanged

StartRule = Callable[[Any, Any, LayerCalibration], dict[str, Any]]
"""(attention, layer, calibration) -> figures for `conversion.json`.

`attention` is the teacher's module and `layer` the new one, both float32. A rule draws random numbers from
torch's global generator only."""


def start_mixed_heads(attention: Any, layer: MixedHeads, calibration: LayerCalibration) -> dict[str, Any]:
    """A rule of `START`: each branch as a layer of its own, from the teacher's attention of its heads; returns the
    figures of the linear branch, whose errors are those of its own heads' output."""
    figures: dict[str, Any] = {}
    for kind, branch in layer.branches.items():
        part = layer.part_of(attention, kind)
        figures |= start_rule(kind_of(branch).name)(part, branch, calibration)
    return figures


START: dict[str, StartRule] = {
    "gated_deltanet": start_fitted,
    "deltaproduct": start_fitted,
    "linear": start_fitted,
    "retention": start_fitted,
    "gated_linear": start_fitted,
    "deltanet": start_fitted,
    "efla": start_fitted,
    "comba": start_fitted,
    "kda": start_channel_rule,
    "gla": start_channel_rule,
    "gdn2": start_channel_rule,
    "mesa": start_fitted,
    "ttt": start_fitted,
    "titans": start_fitted,
    "mixed_heads": start_mixed_heads,
}


def start_rule(mixer: str) -> StartRule:
    """The rule of the mixer with this name; softmax attention, which is none, stays as it is."""
    without_row = start_from_scratch if mixer in MIXERS and MIXERS[mixer].has_state else start_unchanged
    return START.get(mixer, without_row)
