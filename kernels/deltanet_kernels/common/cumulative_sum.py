"""Cumulative sums over the tokens of a row, as an operator that torch.compile does not trace into.

torch.compile splits a long scan over a dimension that is not the last one between programs, and generating that kernel
for a GPU ends in "TypeError: list indices must be integers or slices, not NoneType" (torch 2.11).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deltanet_kernels.common.registration import differentiable_call, operator


class TokenSums(NamedTuple):
    """The argument of `token_sums`, and of its gradient."""

    x: Tensor


def _fake(call: TokenSums) -> Tensor:
    return torch.empty(call.x.shape, dtype=call.x.dtype, device=call.x.device)


@operator(_fake)
def token_sums(call: TokenSums) -> Tensor:
    return call.x.contiguous().cumsum(1)


def _backward(upstream: TokenSums, call: TokenSums) -> tuple[Tensor]:
    return (_sums(TokenSums(upstream.x.flip(1))).flip(1),)


_sums = differentiable_call(token_sums, _backward, ("x",), TokenSums, without=("x",))


def cumulative_sum(x: Tensor) -> Tensor:
    """x_1 + ... + x_t for every token t.

    Args:
        x: [B, T, ...], of a floating dtype.

    Returns:
        [B, T, ...] of the same dtype.
    """
    return _sums(TokenSums(x))
