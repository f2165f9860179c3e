"""States in 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor


def rounded_to_8_bits(state: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of -127 to 127 [B, H, K, V] int8 and the scale of each row [B, H, K], in the dtype of the state."""
    largest = state.abs().amax(-1, keepdim=True)
    steps = torch.where(largest > 0, 127.0 / largest, 0.0)
    return (state * steps + 0.5).floor().to(torch.int8), (largest / 127.0).squeeze(-1)
