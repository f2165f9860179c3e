"""The rule read at boundaries, backward: the gradients of the states, chunks in reverse order.

dS is the gradient of the state that leaves the chunk, R_j = scale Q_j^T dO_j what the queries of a half add to that of
the state that they read (query_sums.py where query heads share a state):

    dV'_1 = rev (K_1 dS);  dS <- e^{G_63 - G_31} dS + R_1
    dV'_0 = e^{G_31 - G} (K_0 dS);  dW = T^T dV';  dU = -gamma beta dW
    dS <- e^{G_31} dS + R_0 + K^T dU

The gradients of the inputs follow in gated_delta_rule/gradients_*.py, with GROUPS. A chunk of 32 tokens is a first half
alone. The state is transposed as in states.py.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.tiles import load_tile, store_tile
from deltanet_kernels.gated_delta_rule.row_factors import middle_decays, output_factors, row_factors, state_factors
from deltanet_kernels.gated_delta_rule.segments import N_BACK, WALK_BACK, load_span


@triton.jit
def _add_reads(dS, q_at, do_at, quads, at_row, i, live, md, me, FULL: tl.constexpr, PRECISION: tl.constexpr):
    """dS + R of a group."""
    do_tile = load_tile(do_at, me[:, None] & live[None, :], FULL)
    q_tile = load_tile(q_at, live[:, None] & md[None, :], FULL)
    _, _, weight, _ = row_factors(quads, at_row, i, live, FULL)
    read = (weight[None, :] * do_tile.to(tl.float32)).to(q_tile.dtype)
    return tl.dot(read, q_tile, dS, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T"])
def group_states_backward_kernel(
    q, k, factors, Tm, do, R, dht, dh, dw, dh0, table, T, tokens,
    q_row, q_token: tl.constexpr, q_head, k_row, k_token: tl.constexpr, k_head, o_row, o_token: tl.constexpr, o_head,
    H: tl.constexpr, HV: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr,
    FINAL: tl.constexpr, INITIAL: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
    SEGMENTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Process chunks in reverse, write dS [V, K] and dW; one program per (sequence, segment, state head, slice of V).

    HQ > HV: R is that of query_sums.py, and q and do are not read.

    Not KEEP: compute only N' of each segment, as gated_delta_rule/states_backward.py does.
    """
    pid = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = pid % NV
    head = (pid // NV) % HV
    segment = pid // (NV * HV)
    n = segment // SEGMENTS
    row = n.to(tl.int64)
    i = tl.arange(0, 32)
    d = tl.arange(0, BK)
    e = i_v * BV + tl.arange(0, BV)
    md = d < K
    me = e < V
    mS = me[:, None] & md[None, :]
    at = e[:, None] * K + d[None, :]
    outer = d[None, :] * V + e[:, None]
    state = segment.to(tl.int64) * HV + head
    dS = tl.zeros([BV, BK], dtype=tl.float32)
    if FINAL:
        dS += load_tile(dht + state * K * V + outer, mS, FULL).to(tl.float32)

    k_base = k + row * k_row + (head // (HV // H)).to(tl.int64) * k_head
    if HQ <= HV:
        q_base = q + row * q_row + (head // (HV // HQ)).to(tl.int64) * q_head
        do_base = do + row * o_row + head.to(tl.int64) * o_head
    k_at = i[:, None] * k_token + d[None, :]
    q_at = i[:, None] * q_token + d[None, :]
    do_at = i[None, :] * o_token + e[:, None]
    own_at = i[None, :] * (HV * V) + e[:, None]
    plane = tl.full([], HV, tl.int64) * tokens
    quads = state_factors(factors, plane)
    reads = output_factors(factors, plane)
    square = i[:, None] * C + i[None, :]
    dtype = k.dtype.element_ty
    count = tl.cdiv(T, C)
    start, stop = count * 0, count
    if SEGMENTS > 1:
        start, stop = load_span(table, n, head, segment % SEGMENTS, WALK_BACK if KEEP else N_BACK, HV, SEGMENTS)
    for step in tl.range(start, stop, num_stages=STAGES):
        t = stop - 1 - (step - start)
        first = t * C
        valid = C if FULL else tl.minimum(T - first, C)
        live = i < valid
        token = first.to(tl.int64)
        at_row = head.to(tl.int64) * tokens + row * T + token
        chunk = (row * count + t) * HV + head
        tile = Tm + chunk * (C * C) + square
        own = ((row * T + token) * HV + head) * V + own_at
        k_0 = load_tile(k_base + token * k_token + k_at, live[:, None] & md[None, :], FULL)
        T_00 = tl.load(tile)
        dS_cast = dS.to(dtype)
        if KEEP:
            store_tile(dh + chunk * (K * V) + at, dS_cast, mS, FULL)
        _, _, until, r = row_factors(quads, at_row, i, live, FULL)
        if C == 64:
            late = i + 32 < valid
            k_1 = load_tile(k_base + (token + 32) * k_token + k_at, late[:, None] & md[None, :], FULL)
            T_10 = tl.load(tile + 32 * C)
            T_11 = tl.load(tile + 32 * C + 32)
            _, _, rev, _ = row_factors(quads, at_row + 32, i, late, FULL)
            dV_1 = tl.dot(dS_cast, tl.trans(k_1), input_precision=PRECISION) * rev[None, :]
            until, fade, rest = middle_decays(factors + at_row, plane, i, valid, FULL)
            until *= r
            dS *= rest
            if HQ > HV:
                dS += load_tile(R + (((row * count + t) * 2 + 1) * HV + head) * (V * K) + at, mS, FULL)
            else:
                dS = _add_reads(
                    dS, q_base + (token + 32) * q_token + q_at, do_base + (token + 32) * o_token + do_at,
                    reads, at_row + 32, i, late, md, me, FULL, PRECISION,
                )  # fmt: skip
            dS_cast = dS.to(dtype)
        else:
            last = factors + at_row + valid - 1
            fade = tl.where(tl.load(last + plane) > 0.0, 0.0, tl.exp(tl.load(last)))
        dV_0 = tl.dot(dS_cast, tl.trans(k_0), input_precision=PRECISION) * until[None, :]
        dS *= fade
        if HQ > HV:
            dS += load_tile(R + ((row * count + t) * (C // 32) * HV + head) * (V * K) + at, mS, FULL)
        else:
            dS = _add_reads(
                dS, q_base + token * q_token + q_at, do_base + token * o_token + do_at, reads, at_row, i, live, md, me,
                FULL, PRECISION,
            )  # fmt: skip
        dW_0 = tl.dot(dV_0.to(dtype), T_00, input_precision=PRECISION)
        if C == 64:
            dW_0 = tl.dot(dV_1.to(dtype), T_10, dW_0, input_precision=PRECISION)
            dW_1 = tl.dot(dV_1.to(dtype), T_11, input_precision=PRECISION)
            _, erase, _, _ = row_factors(quads, at_row + 32, i, late, FULL)
            dS = tl.dot((dW_1 * erase[None, :]).to(dtype), k_1, dS, input_precision=PRECISION)
            if KEEP:
                store_tile(dw + own + 32 * HV * V, dW_1, me[:, None] & late[None, :], FULL)
        _, erase, _, _ = row_factors(quads, at_row, i, live, FULL)
        dS = tl.dot((dW_0 * erase[None, :]).to(dtype), k_0, dS, input_precision=PRECISION)
        if KEEP:
            store_tile(dw + own, dW_0, me[:, None] & live[None, :], FULL)
    if INITIAL:
        to = row * HV + head if KEEP else state - HV
        if (start <= stop) & (start == 0 if KEEP else stop >= 0):
            tl.store(dh0 + to * K * V + outer, dS, mask=mS)
