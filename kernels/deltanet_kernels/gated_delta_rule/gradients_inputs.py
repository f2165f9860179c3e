"""Chunked gated delta rule, backward: the gradients of q, k and the gates, all chunks in parallel.

states_backward.py has the formulas. V', dW, S, dS, Z and E are in memory, so that what remains is matrix products with
few accumulators, and two programs share a multiprocessor.

GROUPS: queries read the state before their group of 32 tokens, and ../group_rule/gradients_queries.py computes dQ. Of
the queries in the second half of a chunk of 64 only R = scale Q_1^T dO_1 is needed here, the gradient that they add to
the state between the halves (../group_rule/query_sums.py, or computed here where no query heads share a state):

    dK += X R^T,  X = e^{G_31 - G} V' in the first half;  dG -= rowsum(k (X R^T))
    dG_31 += e^{G_31} <R, S> + sum(k (X R^T))
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.sequences import locate_chunk
from deltanet_kernels.common.tiles import load_tile, store_tile
from deltanet_kernels.gated_delta_rule.gradients_raw import raw_gradient, store_gate_gradient
from deltanet_kernels.gated_delta_rule.row_factors import (
    middle_decays,
    output_factors,
    row_after,
    row_factors,
    state_factors,
)


@triton.jit(do_not_specialize=["T"])
def input_gradients_kernel(
    q, k, factors, do, h, dh, vn, dw, Z, E, dG_in, g, A_log, dt_bias, dq, dk, dg, gate_sums,
    cu_seqlens, row_of_chunk, first_chunk, T, tokens,
    q_row, q_token: tl.constexpr, q_head, k_row, k_token: tl.constexpr, k_head, o_row, o_token: tl.constexpr, o_head,
    FORM: tl.constexpr,
):  # fmt: skip
    """Compute dQ, dK and dg, summed over the output heads of a key head; one program per (chunk, key head).

    GROUPS: dK and dg alone, over the state heads; if HQ > HV, Z is R [chunks, C / 32, HV, V, K] and q and do are not
    read.
    """
    H: tl.constexpr = FORM.H
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
    NORM: tl.constexpr = FORM.NORM
    GROUPS: tl.constexpr = FORM.GROUPS
    PRECISION: tl.constexpr = FORM.PRECISION
    HO: tl.constexpr = HV if GROUPS or HQ < HV else HQ
    GROUP: tl.constexpr = HO // HV
    READS: tl.constexpr = 1 if GROUPS else HO // HQ
    SHARE: tl.constexpr = HO // H
    pid = tl.program_id(0)
    key_head = pid % H
    c = pid // H
    row, first, flat, valid = locate_chunk(c, cu_seqlens, row_of_chunk, first_chunk, T, C, VARLEN)
    if valid <= 0:
        return
    i = tl.arange(0, C)
    d = tl.arange(0, BK)
    live = i < valid
    md = d < K
    mK = live[:, None] & md[None, :]
    square = i[:, None] * C + i[None, :]
    plane = tl.full([], HV, tl.int64) * tokens
    dtype = k.dtype.element_ty
    k_base = k + row * k_row + key_head.to(tl.int64) * k_head + first * k_token
    k_tile = load_tile(k_base + (i[:, None] * k_token + d[None, :]), mK, FULL)

    dk_acc = tl.zeros([C, BK], dtype=tl.float32)
    dq_acc = tl.zeros([C, BK], dtype=tl.float32)
    dG = tl.zeros([C], dtype=tl.float32)
    for x in range(SHARE):
        out = key_head * SHARE + x
        head = out // GROUP
        own = (flat * HV + head) * V
        state = (c.to(tl.int64) * HV + head) * (K * V)
        if not GROUPS:
            q_base = q + row * q_row + (out // READS).to(tl.int64) * q_head + first * q_token
            q_tile = load_tile(q_base + (i[:, None] * q_token + d[None, :]), mK, FULL)
            Z_tile = tl.load(Z + (c.to(tl.int64) * HO + out) * (C * C) + square)

            do_base = do + row * o_row + out.to(tl.int64) * o_head + first * o_token
            dQ = tl.zeros([C, BK], dtype=tl.float32)
            for i_v in range(0, V, BV):
                e = i_v + tl.arange(0, BV)
                do_tile = load_tile(
                    do_base + (i[:, None] * o_token + e[None, :]), live[:, None] & (e < V)[None, :], FULL
                )
                S = load_tile(h + state + (e[:, None] * K + d[None, :]), (e < V)[:, None] & md[None, :], FULL)
                dQ = tl.dot(do_tile.to(dtype), S.to(dtype), dQ, input_precision=PRECISION)
            f_i, read, _, _ = row_factors(
                output_factors(factors, plane), out.to(tl.int64) * tokens + flat, i, live, FULL
            )
            dQ *= read[:, None]
            dG_read = tl.sum(q_tile.to(tl.float32) * dQ, axis=1)
            dQ = tl.dot(Z_tile, k_tile, dQ, input_precision=PRECISION)
            if READS > 1:
                dQ += tl.where(x % READS == 0, 0.0, dq_acc)
                dq_acc = dQ
            if x % READS == READS - 1:
                dq_at = dq + (flat * HQ + out // READS) * K + (i[:, None] * (HQ * K) + d[None, :])
                store_tile(dq_at, raw_gradient(q_tile, dQ, f_i, NORM), mK, FULL)

        if x % GROUP == 0:
            at_row = head.to(tl.int64) * tokens + flat
            _, erase, _, _ = row_factors(state_factors(factors, plane), at_row, i, live, FULL)
            _, _, rev_r, _ = row_factors(state_factors(factors, plane), at_row, i, live, FULL)
            dK = tl.zeros([C, BK], dtype=tl.float32)
            SdS = 0.0
            k_read = tl.zeros([C], dtype=tl.float32)
            k_kept = tl.zeros([C], dtype=tl.float32)
            if GROUPS and C == 64:
                until, first_half, _ = middle_decays(factors + at_row, plane, i, valid, FULL)
                _, _, _, r_i = row_factors(state_factors(factors, plane), at_row, i, live, FULL)
                k_seen = tl.zeros([C], dtype=tl.float32)
                RS = 0.0
                if HQ <= HV:
                    _, _, weight, _ = row_factors(output_factors(factors, plane), at_row, i, live, FULL)
                    q_from = q + row * q_row + (head // (HV // HQ)).to(tl.int64) * q_head + first * q_token
                    q_tile = load_tile(q_from + (i[:, None] * q_token + d[None, :]), mK, FULL)
                    do_from = do + row * o_row + head.to(tl.int64) * o_head + first * o_token
            for i_v in range(0, V, BV):
                e = i_v + tl.arange(0, BV)
                mS = (e < V)[:, None] & md[None, :]
                mV = live[:, None] & (e < V)[None, :]
                at = own + (i[:, None] * (HV * V) + e[None, :])
                tile = e[:, None] * K + d[None, :]
                state_at = state + tile
                S = load_tile(h + state_at, mS, FULL)
                dS = load_tile(dh + state_at, mS, FULL)
                if READ:
                    dw_tile = load_tile(dw + at, mV, FULL)
                vn_tile = load_tile(vn + at, mV, FULL)
                SdS += tl.sum(S.to(tl.float32) * dS.to(tl.float32))
                if GROUPS and C == 64:
                    if HQ > HV:
                        R = load_tile(Z + ((2 * c + 1).to(tl.int64) * HV + head) * (K * V) + tile, mS, FULL)
                    else:
                        do_at = do_from + (i[None, :] * o_token + e[:, None])
                        do_tile = load_tile(do_at, (e < V)[:, None] & live[None, :], FULL).to(tl.float32)
                        do_tile = (do_tile * tl.where(i >= 32, weight, 0.0)[None, :]).to(dtype)
                        R = tl.dot(do_tile, q_tile, input_precision=PRECISION)
                    RS += tl.sum(R * S.to(tl.float32))
                    R = R.to(dtype)
                    X = vn_tile.to(tl.float32) * (until * r_i)[:, None]
                    if HQ > HV:
                        dK = tl.dot(X.to(dtype), R, dK, input_precision=PRECISION)
                        k_seen += tl.sum(X * tl.dot(k_tile, tl.trans(R), input_precision=PRECISION), axis=1)
                    else:  # not the transpose of a computed tile
                        XR = tl.dot(X.to(dtype), R, input_precision=PRECISION)
                        k_seen += tl.sum(k_tile.to(tl.float32) * XR, axis=1)
                        dK += XR
                # k (dU S^T) as dU (k S): the sums over K would keep another [C, K] tile alive.
                S = S.to(dtype)
                if READ:
                    dU = dw_tile.to(tl.float32) * erase[:, None]
                    dK = tl.dot(dU.to(dtype), S, dK, input_precision=PRECISION)
                    k_read += tl.sum(dU * tl.dot(k_tile, tl.trans(S), input_precision=PRECISION), axis=1)
                dS = dS.to(dtype)
                written = vn_tile.to(tl.float32) * rev_r[:, None]
                dK = tl.dot(written.to(dtype), dS, dK, input_precision=PRECISION)
                k_kept += tl.sum(written * tl.dot(k_tile, tl.trans(dS), input_precision=PRECISION), axis=1)
            if FORM.UNDECAYED:
                k_read = row_after(k_read, i)
            # The last token's own write cancels in dG; leaving it out keeps small gate gradients exact.
            kept = tl.where(i == valid - 1, 0.0, k_kept)
            last = factors + (at_row + valid - 1)
            fade = tl.where(tl.load(last + plane) > 0.0, 0.0, tl.exp(tl.load(last)))
            dG_last = tl.sum(kept, axis=0) + fade * SdS
            dG = k_read - kept + tl.where(i == valid - 1, dG_last, 0.0)
            if GROUPS and C == 64:
                # Token 31 has no gate until the boundary; left out, it cannot blur a small gradient.
                k_seen = tl.where(i < 31, k_seen, 0.0)
                dG += tl.where(i == 31, first_half * RS + tl.sum(k_seen, axis=0), -k_seen)
            dG += load_tile(dG_in + at_row + i, live, FULL)
            if READ:
                E_tile = tl.load(E + (c.to(tl.int64) * HV + head) * (C * C) + square)
                dK = tl.dot(E_tile, k_tile, dK, input_precision=PRECISION)
                dK = tl.dot(tl.trans(E_tile), k_tile, dK, input_precision=PRECISION)
            dk_acc = dK if SHARE == 1 else dk_acc + dK
        if not GROUPS:
            dk_acc = tl.dot(tl.trans(Z_tile), q_tile, dk_acc, input_precision=PRECISION)
            dG += dG_read

        if x % GROUP == GROUP - 1:
            dg_i = tl.cumsum(tl.where(live, dG, 0.0), axis=0, reverse=True)
            sums = gate_sums + (c.to(tl.int64) * HV + head) * 2
            store_gate_gradient(dg_i, g, A_log, dt_bias, dg, sums, (flat + i) * HV + head, head, live, FULL)
    _, _, _, r_i = row_factors(
        state_factors(factors, plane), (key_head * (HV // H)).to(tl.int64) * tokens + flat, i, live, FULL
    )
    dk_at = dk + (flat * H + key_head) * K + (i[:, None] * (H * K) + d[None, :])
    # Loaded once more instead of being kept in registers through the loops.
    k_again = load_tile(k_base + (i[:, None] * k_token + d[None, :]), mK, FULL)
    store_tile(dk_at, raw_gradient(k_again, dk_acc, r_i, NORM), mK, FULL)
