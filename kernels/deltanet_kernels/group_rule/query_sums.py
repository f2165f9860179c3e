"""The rule read at boundaries, backward: the gradients of the states that the query heads of each group cause.

Where several query heads share a state, states_backward.py needs R = sum_m scale Q_m^T dO_m [V, K] of each group,
float32. Computed here first, all groups in parallel, it leaves the sequential loop one tile to load per group.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.sequences import locate_chunk
from deltanet_kernels.common.tiles import load_tile, store_tile
from deltanet_kernels.gated_delta_rule.row_factors import output_factors, row_factors


@triton.jit(do_not_specialize=["T"])
def group_sums_kernel(
    q, factors, do, R, T, tokens, q_row, q_token: tl.constexpr, q_head, o_row, o_token: tl.constexpr, o_head,
    HV: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, FULL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write R [chunks, C / 32, HV, V, K]; one program per (group, state head, slice of V)."""
    READERS: tl.constexpr = HQ // HV
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = pid % NV
    head = (pid // NV) % HV
    group = pid // (NV * HV)
    row, first, flat, valid = locate_chunk(group // (C // 32), None, None, None, T, C, False)
    skipped = group % (C // 32) * 32
    i = tl.arange(0, 32)
    d = tl.arange(0, BK)
    e = i_v * BV + tl.arange(0, BV)
    live = i + skipped < valid
    md = d < K
    me = e < V
    dtype = q.dtype.element_ty
    plane = tl.full([], HV, tl.int64) * tokens
    R_tile = tl.zeros([BV, BK], dtype=tl.float32)
    for m in range(READERS):
        out = (head * READERS + m).to(tl.int64)
        q_from = q + row * q_row + out * q_head + (first + skipped) * q_token
        q_tile = load_tile(q_from + (i[:, None] * q_token + d[None, :]), live[:, None] & md[None, :], FULL)
        do_from = do + row * o_row + out * o_head + (first + skipped) * o_token
        do_tile = load_tile(do_from + (i[None, :] * o_token + e[:, None]), me[:, None] & live[None, :], FULL)
        _, _, weight, _ = row_factors(output_factors(factors, plane), out * tokens + flat + skipped, i, live, FULL)
        read = (weight[None, :] * do_tile.to(tl.float32)).to(dtype)
        R_tile = tl.dot(read, q_tile, R_tile, input_precision=PRECISION)
    R_at = R + (group.to(tl.int64) * HV + head) * (V * K) + (e[:, None] * K + d[None, :])
    store_tile(R_at, R_tile, me[:, None] & md[None, :], FULL)
