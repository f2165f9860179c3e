"""Cumulative sums over the tokens of a row, as an operator that torch.compile does not trace into.

torch.compile splits a long scan over a dimension that is not the last one between programs, and generating that kernel
for a GPU ends in "TypeError: list indices must be integers or slices, not NoneType" (torch 2.11).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltanet_kernels.common.registration import differentiable, gradient, operator


def _fake(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@operator(fake=_fake)
def token_sums(x: Tensor) -> Tensor:
    return x.contiguous().cumsum(1)


def _setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    pass


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return sums(grad.flip(1)).flip(1)  # type: ignore[no-any-return]


gradient("token_sums", _backward, _setup_context)
sums = differentiable(token_sums, _backward, _setup_context)


def cumulative_sum(x: Tensor) -> Tensor:
    """x_1 + ... + x_t for every token t.

    Args:
        x: [B, T, ...], of a floating dtype.

    Returns:
        [B, T, ...] of the same dtype.
    """
    return sums(x)  # type: ignore[no-any-return]
