"""Start values of converted layers: one rule per mixer, one row here.

A rule gives every parameter of the new layer its start value. Without a row, a mixer begins with the teacher's
projections and everything else as in a model trained from scratch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .calibration import LayerCalibration
from .deltaproduct import start_deltaproduct
from .from_scratch import start_from_scratch
from .gated_deltanet import start_gated_deltanet
from .window import start_window

StartRule = Callable[[Any, Any, LayerCalibration, bool], dict[str, Any]]
"""(attention, layer, calibration, fit_memory) -> figures for conversion.json. `attention` is the teacher's, `layer` the
new one, both float32. A rule uses no random numbers but those of torch's global generator."""

START: dict[str, StartRule] = {
    "gated_deltanet": start_gated_deltanet,
    "deltaproduct": start_deltaproduct,
    "window": start_window,
}


def start_rule(mixer: str) -> StartRule:
    """The rule of a mixer, by its name."""
    return START.get(mixer, start_from_scratch)
