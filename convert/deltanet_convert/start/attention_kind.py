"""The start of the kinds that stay quadratic: the teacher's attention, with new parts that change nothing yet."""

from __future__ import annotations

from typing import Any

import torch

from deltanet_hf.mixers import AttentionKind

from .calibration import LayerCalibration


@torch.no_grad()
def start_attention_kind(
    attention: Any, layer: AttentionKind, calibration: LayerCalibration, fit_memory: bool = True
) -> dict[str, Any]:
    """A rule of `START`; nothing is fitted, and there are no figures."""
    layer.start_neutral(float(getattr(attention.config, "initializer_range", 0.02)))
    layer.load_state_dict(attention.state_dict(), strict=False)  # type: ignore[attr-defined]
    return {}
