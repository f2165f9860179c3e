"""States in 8 bits, on CUDA: one kernel after a prompt, and a part of that of a step."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import operator
from deltanet_kernels.common.sizes import cdiv, power_of_two
from deltanet_kernels.group_rule.calls import RoundStateCall

TILE = 2048  # elements per program


@triton.jit
def rounded_rows(S):
    """Integers int8 of the rows of S [R, V] float32, and the scale of each."""
    largest = tl.max(tl.abs(S), axis=1)
    steps = tl.where(largest > 0, tl.div_rn(127.0, largest), 0.0)
    return tl.floor(S * steps[:, None] + 0.5).to(tl.int8), tl.div_rn(largest, 127.0)


@triton.jit(do_not_specialize=["rows"])
def round_state_kernel(state, codes, scale, rows, V: tl.constexpr, BV: tl.constexpr, R: tl.constexpr):
    """One program per R of the rows of the states."""
    n = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    e = tl.arange(0, BV)
    m = (n < rows)[:, None] & (e < V)[None, :]
    at = n[:, None] * V + e[None, :]
    rounded, scale_R = rounded_rows(tl.load(state + at, mask=m, other=0.0))
    tl.store(codes + at, rounded, mask=m)
    tl.store(scale + n, scale_R, mask=n < rows)


def _fake_round(call: RoundStateCall):
    (state,) = call
    return torch.empty(state.shape, dtype=torch.int8, device=state.device), state.new_empty(state.shape[:-1])


@operator(_fake_round)
def round_state_op(call: RoundStateCall) -> tuple[Tensor, Tensor]:
    """Integers [B, H, K, V] and scales [B, H, K]."""
    codes, scale = _fake_round(call)
    V = codes.shape[-1]
    BV = power_of_two(V, 1)
    R = max(1, TILE // BV)
    launch(
        round_state_kernel, cdiv(scale.numel(), R), call.state.contiguous(), codes, scale, scale.numel(), V=V, BV=BV,
        R=R, num_warps=4,
    )  # fmt: skip
    return codes, scale


def round_state_triton(call: RoundStateCall) -> tuple[Tensor, Tensor]:
    """`deltanet_kernels.round_state` in Triton, for checked arguments.

    Raises:
        NotImplementedError: dtypes other than float32.
    """
    if call.state.dtype != torch.float32:
        raise NotImplementedError(f"a state in {call.state.dtype}: the kernel takes float32")
    return round_state_op(call)
