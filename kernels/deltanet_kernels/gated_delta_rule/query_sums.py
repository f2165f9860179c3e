"""Chunked gated delta rule, backward: sums over the query heads that read one state, all chunks in parallel.

Where several query heads share a state, states_backward.py needs of them, per chunk, only

    A = sum_m P_m^T dO_m [C, V]        R = scale sum_m Q_m^T (gamma dO_m) [K, V]

Computed here first, they leave its sequential loop two tiles to load instead of three per query head, few enough to be
loaded ahead: with three query heads of 64, 4,096 tokens and twelve states an H200 spent 8 us per chunk without this
kernel. Both are float32 and stored transposed.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.sequences import locate_chunk
from deltanet_kernels.common.tiles import load_tile, store_tile
from deltanet_kernels.gated_delta_rule.row_factors import output_factors, row_factors


@triton.jit(do_not_specialize=["T"])
def query_sums_kernel(
    q, factors, P, do, A, R, cu_seqlens, row_of_chunk, first_chunk, T, tokens,
    q_row, q_token: tl.constexpr, q_head, o_row, o_token: tl.constexpr, o_head,
    HV: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, VARLEN: tl.constexpr, FULL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write A [chunks, HV, V, C] and R [chunks, HV, V, K]; one program per (chunk, state head, slice of V)."""
    GROUP: tl.constexpr = HQ // HV
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = pid % NV
    head = (pid // NV) % HV
    c = pid // (NV * HV)
    row, first, flat, valid = locate_chunk(c, cu_seqlens, row_of_chunk, first_chunk, T, C, VARLEN)
    if valid <= 0:
        return
    i = tl.arange(0, C)
    d = tl.arange(0, BK)
    e = i_v * BV + tl.arange(0, BV)
    live = i < valid
    md = d < K
    me = e < V
    dtype = q.dtype.element_ty
    plane = tl.full([], HV, tl.int64) * tokens
    A_tile = tl.zeros([BV, C], dtype=tl.float32)
    R_tile = tl.zeros([BV, BK], dtype=tl.float32)
    for m in tl.static_range(GROUP):
        out = head * GROUP + m
        do_from = do + row * o_row + out.to(tl.int64) * o_head + first * o_token
        do_tile = load_tile(do_from + (i[None, :] * o_token + e[:, None]), live[None, :] & me[:, None], FULL).to(dtype)
        P_tile = tl.load(P + (c.to(tl.int64) * HQ + out) * (C * C) + (i[:, None] * C + i[None, :]))
        A_tile = tl.dot(do_tile, P_tile, A_tile, input_precision=PRECISION)
        q_from = q + row * q_row + out.to(tl.int64) * q_head + first * q_token
        q_tile = load_tile(q_from + (i[:, None] * q_token + d[None, :]), live[:, None] & md[None, :], FULL)
        _, read, _, _ = row_factors(output_factors(factors, plane), out.to(tl.int64) * tokens + flat, i, live, FULL)
        scaled = (read[None, :] * do_tile.to(tl.float32)).to(dtype)
        R_tile = tl.dot(scaled, q_tile, R_tile, input_precision=PRECISION)
    state = c.to(tl.int64) * HV + head
    store_tile(A + state * (V * C) + (e[:, None] * C + i[None, :]), A_tile, me[:, None] & (i[None, :] < C), FULL)
    store_tile(R + state * (V * K) + (e[:, None] * K + d[None, :]), R_tile, me[:, None] & md[None, :], FULL)
