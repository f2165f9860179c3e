"""The gates of a prompt beside a state of what has left the window, on CUDA: one kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import operator
from deltanet_kernels.common.rows import rows
from deltanet_kernels.common.sizes import cdiv
from deltanet_kernels.common.tiles import log_decay, write_strength
from deltanet_kernels.group_rule.calls import GroupGatesCall
from deltanet_kernels.packed_cache.numbers import GROUP

BLOCK = 512


@triton.jit(do_not_specialize=["T", "L", "sinks", "groups"])
def group_gates_kernel(
    a, b, A_log, dt_bias, length, starts, g, beta, waiting_g, waiting_beta, T, L, sinks, groups, a_row, b_row,
    H: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK gates of a row, or places for them; tokens of a and b are x_row elements apart.

    With `starts` [B + 1] the rows are parts of one, of T tokens at most.
    """
    places = GROUP * (groups + 1)
    blocks = tl.cdiv(tl.maximum(T, places) * H, BLOCK)
    n = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    first, own = n * T, n * L  # of a and b, and of g and beta
    if starts is not None:
        first = tl.load(starts + n).to(tl.int64)
        T = (tl.load(starts + n + 1) - first).to(tl.int32)
        own, L = first, L - first.to(tl.int32)
    m = i < T * H
    t, h = i // H, i % H
    end = T if length is None else tl.load(length).to(tl.int32)
    left = tl.maximum(end - 1 - groups * GROUP, 0) // GROUP * GROUP
    writes = (t >= sinks) & (t < left)
    x = tl.load(a + (first + t) * a_row + h, mask=m, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + h, mask=m, other=0.0).to(tl.float32)
    x = log_decay(x, tl.load(A_log + h, mask=m, other=0.0)).to(tl.bfloat16)
    y = tl.load(b + (first + t) * b_row + h, mask=m, other=0.0)
    y = write_strength(y, LIMIT).to(tl.bfloat16)
    at = own * H + i
    tl.store(g + at, tl.where(writes, x.to(tl.float32), 0.0), mask=m & (t < L))
    tl.store(beta + at, tl.where(writes, y.to(tl.float32), 0.0), mask=m & (t < L))
    at = (n * places + t % places) * H + h
    # Places that no token has taken hold 0.
    waits = (t >= end - places) & (t < tl.maximum(end, places))
    tl.store(waiting_g + at, tl.where(t < end, x, 0.0), mask=waits)
    tl.store(waiting_beta + at, tl.where(t < end, y, 0.0), mask=waits)


def _fake_gates(call: GroupGatesCall):
    a, hidden = call.a, 32 * call.groups
    B, T, H = a.shape
    rows = B if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    gates = (a.new_empty(B, max(T - hidden, 0), H, dtype=torch.float32) for _ in range(2))
    return *gates, *(a.new_empty(rows, hidden + 32, H, dtype=torch.bfloat16) for _ in range(2))


@operator(_fake_gates)
def group_gates_op(call: GroupGatesCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """g, beta [B, max(T - 32 N, 0), H] and those that wait [B, 32 (N + 1), H], B sequences."""
    made: tuple[Tensor, Tensor, Tensor, Tensor] = _fake_gates(call)
    (T, H), L, (B, places) = call.a.shape[1:], made[0].shape[1], made[2].shape[:2]
    starts = call.cu_seqlens
    if starts is not None:
        T, starts = call.longest, starts.contiguous()
    (a, a_row), (b, b_row) = rows(call.a), rows(call.b)
    launch(
        group_gates_kernel, B * cdiv(max(T, places) * H, BLOCK), a, b, call.A_log, call.dt_bias, call.length, starts,
        *made, T, L, call.sinks, call.groups, a_row, b_row, H=H, LIMIT=call.limit, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return made


def group_gates_triton(call: GroupGatesCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`deltanet_kernels.group_gates` in Triton, for checked arguments.

    Raises:
        NotImplementedError: float64.
    """
    if torch.float64 in (call.a.dtype, call.b.dtype):
        raise NotImplementedError("dtype torch.float64: the kernels compute in float32")
    return group_gates_op(call)
