"""Chunked gated delta rule, backward: the gradients of q, k and the gates, all chunks in parallel.

states_backward.py has the formulas. V', dW, S, dS, Z and E are in memory, so that what remains is matrix products with
few accumulators, and two programs share a multiprocessor.

GROUPS: queries read the state before their group of 32 tokens (../group_rule/), so that in a chunk of 64 only those of
the second half see keys, of the first half, decayed until the boundary between them:

    Z_ij = scale f_i e^{G_31 - G_j} r_j dP_ij  (i >= 32 > j)

and all that the scores and the reads of the second half contribute to dG from the side of the queries is token 31's.
Z and its transpose are computed here, each by its own product.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.sequences import locate_chunk
from deltanet_kernels.common.tiles import load_tile, store_tile
from deltanet_kernels.gated_delta_rule.gradients_raw import raw_gradient, store_gate_gradient
from deltanet_kernels.gated_delta_rule.row_factors import output_factors, row_after, row_factors, state_factors


@triton.jit
def _decay_to_middle(factors, plane, at_row, i, valid, live, FULL: tl.constexpr):
    """e^{G_31 - G_j} r_j of the first 32 rows of a chunk, 0 of the others."""
    rows = factors + at_row
    middle = rows + tl.minimum(valid, 32) - 1
    G, s = load_tile(rows + i, live, FULL), load_tile(rows + plane + i, live, FULL)
    _, _, _, r = row_factors(state_factors(factors, plane), at_row, i, live, FULL)
    seen = (i < 32) & (s == tl.load(middle + plane))
    return tl.where(seen, tl.exp(tl.minimum(tl.load(middle) - G, 0.0)), 0.0) * r


@triton.jit
def _products(
    x, x_token: tl.constexpr, y, y_token: tl.constexpr, live, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    dtype: tl.constexpr, FULL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """X Y^T [C, C] of two tiles [C, V] in memory, in slices of V."""
    i = tl.arange(0, C)
    total = tl.zeros([C, C], dtype=tl.float32)
    for i_v in range(0, V, BV):
        e = i_v + tl.arange(0, BV)
        mask = live[:, None] & (e < V)[None, :]
        x_tile = load_tile(x + (i[:, None] * x_token + e[None, :]), mask, FULL).to(dtype)
        y_tile = load_tile(y + (i[:, None] * y_token + e[None, :]), mask, FULL).to(dtype)
        total = tl.dot(x_tile, tl.trans(y_tile), total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=["T"])
def input_gradients_kernel(
    q, k, factors, do, h, dh, vn, dw, Z, E, dG_in, g, A_log, dt_bias, dq, dk, dg, gate_sums,
    cu_seqlens, row_of_chunk, first_chunk, T, tokens,
    q_row, q_token: tl.constexpr, q_head, k_row, k_token: tl.constexpr, k_head, o_row, o_token: tl.constexpr, o_head,
    H: tl.constexpr, HV: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr, VARLEN: tl.constexpr, FULL: tl.constexpr,
    GATE: tl.constexpr, READ: tl.constexpr, UNDECAYED: tl.constexpr, GROUPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dQ, dK and dg, summed over the output heads of a key head; one program per (chunk, key head)."""
    HO: tl.constexpr = HQ if HQ > HV else HV
    GROUP: tl.constexpr = HO // HV
    READS: tl.constexpr = HO // HQ
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
        q_base = q + row * q_row + (out // READS).to(tl.int64) * q_head + first * q_token
        q_tile = load_tile(q_base + (i[:, None] * q_token + d[None, :]), mK, FULL)
        if not GROUPS:
            Z_tile = tl.load(Z + (c.to(tl.int64) * HO + out) * (C * C) + square)

        do_base = do + row * o_row + out.to(tl.int64) * o_head + first * o_token
        if GROUPS and C == 64:
            at_out = out.to(tl.int64) * tokens + flat
            _, _, weight, _ = row_factors(output_factors(factors, plane), at_out, i, live, FULL)
            late = tl.where(i >= 32, weight, 0.0)
            early = _decay_to_middle(factors, plane, head.to(tl.int64) * tokens + flat, i, valid, live, FULL)
            dP = _products(do_base, o_token, vn + own, HV * V, live, V, BV, C, dtype, FULL, PRECISION)
            dP *= late[:, None] * early[None, :]
            # Token 31 has no gate until the boundary; left out, it cannot blur a small gradient.
            Y = dP * tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            Y = tl.where(i[None, :] < 31, Y, 0.0)
            dG_scores = tl.where(i == 31, tl.sum(Y), -tl.sum(Y, axis=0))
            Z_tile = dP.to(dtype)
        dQ = tl.zeros([C, BK], dtype=tl.float32)
        for i_v in range(0, V, BV):
            e = i_v + tl.arange(0, BV)
            do_tile = load_tile(do_base + (i[:, None] * o_token + e[None, :]), live[:, None] & (e < V)[None, :], FULL)
            S = load_tile(h + state + (e[:, None] * K + d[None, :]), (e < V)[:, None] & md[None, :], FULL)
            dQ = tl.dot(do_tile.to(dtype), S.to(dtype), dQ, input_precision=PRECISION)
        f_i, read, _, _ = row_factors(output_factors(factors, plane), out.to(tl.int64) * tokens + flat, i, live, FULL)
        dQ *= read[:, None]
        dG_read = tl.sum(q_tile.to(tl.float32) * dQ, axis=1)
        if GROUPS:
            dG_read = tl.where(i == 31, tl.sum(tl.where(i >= 32, dG_read, 0.0), axis=0), 0.0)
            if C == 64:
                dG_read += dG_scores
        if not GROUPS or C == 64:
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
            for i_v in range(0, V, BV):
                e = i_v + tl.arange(0, BV)
                mS = (e < V)[:, None] & md[None, :]
                mV = live[:, None] & (e < V)[None, :]
                at = own + (i[:, None] * (HV * V) + e[None, :])
                state_at = state + (e[:, None] * K + d[None, :])
                S = load_tile(h + state_at, mS, FULL)
                dS = load_tile(dh + state_at, mS, FULL)
                if READ:
                    dw_tile = load_tile(dw + at, mV, FULL)
                vn_tile = load_tile(vn + at, mV, FULL)
                SdS += tl.sum(S.to(tl.float32) * dS.to(tl.float32))
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
            if UNDECAYED:
                k_read = row_after(k_read, i)
            # The last token's own write cancels in dG; leaving it out keeps small gate gradients exact.
            kept = tl.where(i == valid - 1, 0.0, k_kept)
            last = factors + (at_row + valid - 1)
            fade = tl.where(tl.load(last + plane) > 0.0, 0.0, tl.exp(tl.load(last)))
            dG_last = tl.sum(kept, axis=0) + fade * SdS
            dG = k_read - kept + tl.where(i == valid - 1, dG_last, 0.0)
            dG += load_tile(dG_in + at_row + i, live, FULL)
            if READ:
                E_tile = tl.load(E + (c.to(tl.int64) * HV + head) * (C * C) + square)
                dK = tl.dot(E_tile, k_tile, dK, input_precision=PRECISION)
                dK = tl.dot(tl.trans(E_tile), k_tile, dK, input_precision=PRECISION)
            dk_acc = dK if SHARE == 1 else dk_acc + dK
        if not GROUPS:
            dk_acc = tl.dot(tl.trans(Z_tile), q_tile, dk_acc, input_precision=PRECISION)
        elif C == 64:
            Z_turned = _products(vn + own, HV * V, do_base, o_token, live, V, BV, C, dtype, FULL, PRECISION)
            Z_turned *= early[:, None] * late[None, :]
            dk_acc = tl.dot(Z_turned.to(dtype), q_tile, dk_acc, input_precision=PRECISION)
        dG += dG_read

        if x % GROUP == GROUP - 1:
            dg_i = tl.cumsum(tl.where(live, dG, 0.0), axis=0, reverse=True)
            sums = gate_sums + (c.to(tl.int64) * HV + head) * 2
            store_gate_gradient(dg_i, g, A_log, dt_bias, dg, sums, (flat + i) * HV + head, head, live, GATE, FULL)
    _, _, _, r_i = row_factors(
        state_factors(factors, plane), (key_head * (HV // H)).to(tl.int64) * tokens + flat, i, live, FULL
    )
    dk_at = dk + (flat * H + key_head) * K + (i[:, None] * (H * K) + d[None, :])
    # Loaded once more instead of being kept in registers through the loops.
    k_again = load_tile(k_base + (i[:, None] * k_token + d[None, :]), mK, FULL)
    store_tile(dk_at, raw_gradient(k_again, dk_acc, r_i, NORM), mK, FULL)
