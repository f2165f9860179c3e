"""States in 8 bits, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from deltanet_kernels.group_rule.calls import RoundStateCall


def torch_round_state(call: RoundStateCall) -> tuple[Tensor, Tensor]:
    """`deltanet_kernels.round_state` in PyTorch."""
    (state,) = call
    largest = state.abs().amax(-1, keepdim=True)
    steps = torch.where(largest > 0, 127.0 / largest, 0.0)
    return (state * steps + 0.5).floor().to(torch.int8), (largest / 127.0).squeeze(-1)
