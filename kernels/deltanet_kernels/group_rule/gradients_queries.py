"""The rule read at boundaries, backward: the gradients of the queries, all chunks in parallel.

    dQ_0 = scale dO_0 S^T;  dQ_1 = scale (e^{G_31} dO_1 S^T + (dO_1 X^T) K_0),  X = e^{G_31 - G} V'_0

for the halves 0 and 1 of a chunk of 64 and the state S that enters it; of a chunk of 32 the first alone. Both halves
are rows of one tile, so that the products fill the tensor cores.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.sequences import locate_chunk
from deltanet_kernels.common.tiles import load_tile, store_tile
from deltanet_kernels.gated_delta_rule.gradients_raw import raw_gradient
from deltanet_kernels.gated_delta_rule.row_factors import middle_decays, output_factors, row_factors, state_factors


@triton.jit(do_not_specialize=["T"])
def query_gradients_kernel(
    q, k, factors, do, h, vn, dq, T, tokens,
    q_row, q_token: tl.constexpr, q_head, k_row, k_token: tl.constexpr, k_head, o_row, o_token: tl.constexpr, o_head,
    H: tl.constexpr, HV: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr, NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per (chunk, query head)."""
    READS: tl.constexpr = HV // HQ if HV > HQ else 1
    pid = tl.program_id(0)
    query_head = pid % HQ
    c = pid // HQ
    row, first, flat, valid = locate_chunk(c, None, None, None, T, C, False)
    i = tl.arange(0, C)
    d = tl.arange(0, BK)
    live = i < valid
    md = d < K
    mK = live[:, None] & md[None, :]
    plane = tl.full([], HV, tl.int64) * tokens
    dtype = k.dtype.element_ty
    dq_acc = tl.zeros([C, BK], dtype=tl.float32)
    for m in range(READS):
        out = query_head * READS + m
        head = out // (HQ // HV) if HQ > HV else out
        own = (flat * HV + head) * V
        state = (c.to(tl.int64) * HV + head) * (K * V)
        do_base = do + row * o_row + out.to(tl.int64) * o_head + first * o_token
        dQ = tl.zeros([C, BK], dtype=tl.float32)
        if C == 64:
            Z = tl.zeros([C, C], dtype=tl.float32)
        for i_v in range(0, V, BV):
            e = i_v + tl.arange(0, BV)
            mV = live[:, None] & (e < V)[None, :]
            do_tile = load_tile(do_base + (i[:, None] * o_token + e[None, :]), mV, FULL).to(dtype)
            S = load_tile(h + state + (e[:, None] * K + d[None, :]), (e < V)[:, None] & md[None, :], FULL)
            dQ = tl.dot(do_tile, S.to(dtype), dQ, input_precision=PRECISION)
            if C == 64:
                vn_tile = load_tile(vn + own + (i[:, None] * (HV * V) + e[None, :]), mV, FULL).to(dtype)
                Z = tl.dot(do_tile, tl.trans(vn_tile), Z, input_precision=PRECISION)
        at_row = out.to(tl.int64) * tokens + flat
        _, read, weight, _ = row_factors(output_factors(factors, plane), at_row, i, live, FULL)
        dQ *= read[:, None]
        if C == 64:
            at_row = head.to(tl.int64) * tokens + flat
            until, _, _ = middle_decays(factors + at_row, plane, i, valid, FULL)
            _, _, _, r = row_factors(state_factors(factors, plane), at_row, i, live, FULL)
            Z *= tl.where(i >= 32, weight, 0.0)[:, None] * (until * r)[None, :]
            k_base = k + row * k_row + (head // (HV // H)).to(tl.int64) * k_head + first * k_token
            k_tile = load_tile(k_base + (i[:, None] * k_token + d[None, :]), mK, FULL)
            dQ = tl.dot(Z.to(dtype), k_tile, dQ, input_precision=PRECISION)
        dq_acc = dQ if READS == 1 else dq_acc + dQ
    at_row = (query_head * READS).to(tl.int64) * tokens + flat
    f, _, _, _ = row_factors(output_factors(factors, plane), at_row, i, live, FULL)
    q_base = q + row * q_row + query_head.to(tl.int64) * q_head + first * q_token
    q_tile = load_tile(q_base + (i[:, None] * q_token + d[None, :]), mK, FULL)
    dq_at = dq + (flat * HQ + query_head) * K + (i[:, None] * (HQ * K) + d[None, :])
    store_tile(dq_at, raw_gradient(q_tile, dq_acc, f, NORM), mK, FULL)
