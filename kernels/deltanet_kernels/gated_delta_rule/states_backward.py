"""Chunked gated delta rule, backward: the gradients of the states, chunks in reverse order.

The backward pass solves the transposed system of (I + L) V' = W. dS is the gradient of the state that leaves the chunk.

    this file, sequential:
        dV' = rev (K dS) + P^T dO;  dW = T^T dV';  dV = beta dW;  dU = -gamma dV
        dS <- e^{G_last} dS + K^T dU + scale Q^T (gamma dO)
        (where query heads share a state, query_sums.py has summed P^T dO and scale Q^T (gamma dO) over them)
    gradients_pairs.py, all chunks in parallel, from V', dW and dO (terms between two tokens of a chunk):
        dP = tril(dO V'^T);  Z = scale D dP
        dL = -tril(dW V'^T, -1);  E = beta D dL
        dbeta = rowsum(dW V') / beta = rowsum(dW (V - gamma U - (D K K^T) V'))
        (beta = sigmoid(b): db = (1 - beta) rowsum(dW V'))
        X = dL L;  Y = dP P;  dG = rowsum(Y) - colsum(Y) + rowsum(X) - colsum(X)
    gradients_inputs.py, all chunks in parallel, from Z, E, S and dS:
        dQ = scale gamma (dO S^T) + Z K
        dK = rev (V' dS^T) + dU S^T + Z^T Q + (E + E^T) K
        dG += rowsum(q dQ_inter) + rowsum(k (dU S^T)) - rowsum(k dK_state)
        dG_last += sum(k dK_state) + e^{G_last} <dS, S>;   dg = reverse cumsum of dG within the chunk

Without an erase term dU, E and X are 0. If the prediction is undecayed, what row i contributes to dG by X and by dU S^T
belongs to row i - 1.

gradients_64.py and hopper/gradients_128.py compute the last two stages in one kernel. The diagonal of Y cancels in dG
and is left out. With the L2 norm in the operator P, Z and E include the norms of both sides, so that raw q and k
multiply them. Z and E, one [C, C] tile each, go through memory: their transposes are required too, and Triton 3.4 to
3.7.0 miscompiles a product with a transposed accumulator on Hopper. The state is transposed as in states.py.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.sequences import locate_row
from deltanet_kernels.common.tiles import load_tile, store_tile
from deltanet_kernels.gated_delta_rule.row_factors import output_factors, row_factors, state_factors
from deltanet_kernels.gated_delta_rule.segments import N_BACK, WALK_BACK, load_span


@triton.jit(do_not_specialize=["T"])
def states_backward_kernel(
    q, k, factors, Tm, P, do, A, R, dht, dh, dw, dh0, table, cu_seqlens, first_chunk, T, tokens,
    q_row, q_token: tl.constexpr, q_head, k_row, k_token: tl.constexpr, k_head, o_row, o_token: tl.constexpr, o_head,
    FINAL: tl.constexpr, INITIAL: tl.constexpr, KEEP: tl.constexpr, SEGMENTS: tl.constexpr, STAGES: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """Process chunks in reverse, write dS [V, K] and dW; one program per (sequence, segment, state head, slice of V).

    HQ > HV: A and R are those of query_sums.py, and q, P and do are not read.

    Not KEEP: compute only N' of each segment, where it is used, into dh0 as the gradient that enters the previous one.
    """
    HV: tl.constexpr = FORM.HV
    HQ: tl.constexpr = FORM.HQ
    K: tl.constexpr = FORM.K
    V: tl.constexpr = FORM.V
    BK: tl.constexpr = FORM.BK
    BV: tl.constexpr = FORM.BV
    C: tl.constexpr = FORM.C
    VARLEN: tl.constexpr = FORM.VARLEN
    FULL: tl.constexpr = FORM.FULL
    READ: tl.constexpr = FORM.READ
    PRECISION: tl.constexpr = FORM.PRECISION
    pid = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = pid % NV
    head = (pid // NV) % HV
    segment = pid // (NV * HV)
    n = segment // SEGMENTS
    row, begin, flat, length = locate_row(n, cu_seqlens, T, VARLEN)
    chunk = tl.load(first_chunk + n).to(tl.int64) if VARLEN else row * tl.cdiv(T, C)
    i = tl.arange(0, C)
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

    k_base = k + row * k_row + (head // (HV // FORM.H)).to(tl.int64) * k_head + begin * k_token
    q_base = q + row * q_row + begin * q_token
    do_base = do + row * o_row + begin * o_token
    k_at = i[:, None] * k_token + d[None, :]
    q_at = i[:, None] * q_token + d[None, :]
    do_at = i[None, :] * o_token + e[:, None]
    dw_at = i[None, :] * (HV * V) + e[:, None]
    plane = tl.full([], HV, tl.int64) * tokens
    rows = factors + (head.to(tl.int64) * tokens + flat)
    square = i[:, None] * C + i[None, :]
    dtype = k.dtype.element_ty
    count = tl.cdiv(length, C)
    start, stop = count * 0, count
    if SEGMENTS > 1:
        start, stop = load_span(table, n, head, segment % SEGMENTS, WALK_BACK if KEEP else N_BACK, HV, SEGMENTS)
    for step in tl.range(start, stop, num_stages=STAGES):
        t = stop - 1 - (step - start)
        first = t * C
        valid = C if FULL else tl.minimum(length - first, C)
        live = i < valid
        token = first.to(tl.int64)
        k_tile = load_tile(k_base + token * k_token + k_at, live[:, None] & md[None, :], FULL)
        if READ:
            T_tile = tl.load(Tm + ((chunk + t) * HV + head) * (C * C) + square)
        last = rows + (token + valid - 1)
        fade = tl.where(tl.load(last + plane) > 0.0, 0.0, tl.exp(tl.load(last)))

        dS_cast = dS.to(dtype)
        if KEEP:
            store_tile(dh + ((chunk + t) * HV + head) * (K * V) + at, dS_cast, mS, FULL)
        dVn = tl.dot(dS_cast, tl.trans(k_tile), input_precision=PRECISION)
        at_row = head.to(tl.int64) * tokens + flat + token
        _, _, rev_r, _ = row_factors(state_factors(factors, plane), at_row, i, live, FULL)
        dVn *= rev_r[None, :]
        dS = dS * fade
        if HQ > HV:
            sums = ((chunk + t) * HV + head) * V
            dVn += load_tile(A + sums * C + (e[:, None] * C + i[None, :]), me[:, None] & (i[None, :] < C), FULL)
            dS += load_tile(R + sums * K + at, mS, FULL)
        else:
            do_from = do_base + head.to(tl.int64) * o_head + token * o_token
            do_tile = load_tile(do_from + do_at, live[None, :] & me[:, None], FULL).to(dtype)
            P_tile = tl.load(P + ((chunk + t) * HV + head) * (C * C) + square)
            dVn = tl.dot(do_tile, P_tile, dVn, input_precision=PRECISION)
            q_from = q_base + (head // (HV // HQ)).to(tl.int64) * q_head + token * q_token
            q_tile = load_tile(q_from + q_at, live[:, None] & md[None, :], FULL)
            _, read_i, _, _ = row_factors(output_factors(factors, plane), at_row, i, live, FULL)
            read = (read_i[None, :] * do_tile.to(tl.float32)).to(dtype)
            dS = tl.dot(read, q_tile, dS, input_precision=PRECISION)
        dW = dVn
        if READ:
            dW = tl.dot(dVn.to(dtype), T_tile, input_precision=PRECISION)
        if READ:
            _, erase, _, _ = row_factors(state_factors(factors, plane), at_row, i, live, FULL)
            dS = tl.dot((dW * erase[None, :]).to(dtype), k_tile, dS, input_precision=PRECISION)
        if KEEP:
            store_tile(dw + ((flat + token) * HV + head) * V + dw_at, dW, live[None, :] & me[:, None], FULL)
    if INITIAL:
        to = n.to(tl.int64) * HV + head if KEEP else state - HV
        if (start <= stop) & (start == 0 if KEEP else stop >= 0):
            tl.store(dh0 + to * K * V + outer, dS, mask=mS)
