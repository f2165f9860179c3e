"""Start values of converted layers: one rule per mixer, one row here.

A rule gives every parameter of the new layer its start value. A mixer without a row starts with the teacher's
projections, and with everything else as in a model trained from scratch; a kind that stays quadratic starts as the
teacher's attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deltanet_hf.mixers import MIXERS, AttentionKind

from .attention_kind import start_attention_kind
from .calibration import LayerCalibration
from .channel_gates import start_gdn2, start_gla, start_kda
from .deltaproduct import start_deltaproduct
from .from_scratch import start_from_scratch
from .gated_deltanet import start_gated_deltanet
from .mesa import start_mesa
from .mixed_heads import start_mixed_heads
from .titans import start_titans
from .ttt import start_ttt
from .window import start_window

StartRule = Callable[[Any, Any, LayerCalibration, bool], dict[str, Any]]
"""(attention, layer, calibration, fit_memory) -> figures for `conversion.json`.

`attention` is the teacher's module and `layer` the new one, both float32. `fit_memory` is false with the option
`--no-fit-memory`; rules that fit no decay ignore it. A rule draws random numbers from torch's global generator only,
and may run in a thread beside those of other layers: `turns.py` keeps their random numbers apart."""

START: dict[str, StartRule] = {
    "gated_deltanet": start_gated_deltanet,
    "deltaproduct": start_deltaproduct,
    "linear": start_gated_deltanet,
    "retention": start_gated_deltanet,
    "gated_linear": start_gated_deltanet,
    "deltanet": start_gated_deltanet,
    "efla": start_gated_deltanet,
    "comba": start_gated_deltanet,
    "kda": start_kda,
    "gla": start_gla,
    "gdn2": start_gdn2,
    "mesa": start_mesa,
    "ttt": start_ttt,
    "titans": start_titans,
    "window": start_window,
    "mixed_heads": start_mixed_heads,
    "fox": start_attention_kind,
    "alibi": start_attention_kind,
    "deltaformer": start_attention_kind,
    "path": start_attention_kind,
}


def start_rule(mixer: str) -> StartRule:
    """The rule of the mixer with this name."""
    quadratic = issubclass(MIXERS[mixer], AttentionKind)
    return START.get(mixer, start_attention_kind if quadratic else start_from_scratch)
