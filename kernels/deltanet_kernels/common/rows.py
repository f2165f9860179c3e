"""Tensors of tokens as rows at a constant distance, which kernels read without a copy."""

from __future__ import annotations

from torch import Tensor


def rows(x: Tensor) -> tuple[Tensor, int]:
    """The tokens of x [B, T, ...] as rows: x or, where its tokens are not each contiguous and evenly spaced, a copy.

    Slices of the last dimension, as of several projections in one tensor, need no copy.

    Returns:
        The tensor, and the number of elements from the start of one token to the start of the next.
    """
    shape, strides = x.shape, x.stride()
    batch, tokens = shape[0], shape[1]
    dense, width = True, 1
    for i in range(len(shape) - 1, 1, -1):
        dense = dense and (shape[i] == 1 or strides[i] == width)
        width *= shape[i]
    if batch * tokens <= 1:  # the strides say nothing
        return (x if dense else x.contiguous()), width
    distance = strides[1] if tokens > 1 else strides[0]
    if dense and (batch == 1 or tokens == 1 or strides[0] == tokens * distance):
        return x, distance
    return x.contiguous(), width


def unit_stride(x: Tensor) -> Tensor:
    """x, or a copy of it, with adjacent channels."""
    return x if x.stride(-1) == 1 else x.contiguous()
