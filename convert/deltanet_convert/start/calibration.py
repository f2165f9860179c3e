"""The calibration data of one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class LayerCalibration:
    """The inputs of the teacher's attention on calibration text."""

    hidden_states: Tensor  # [n, T, hidden] float32, after the layer's input norm
    kwargs: dict[str, Any]  # the attention's other arguments, for a batch of one: position_embeddings, attention_mask
