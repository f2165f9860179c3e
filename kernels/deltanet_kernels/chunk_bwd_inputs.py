"""Gated delta rule over chunks, backward: the gradients of the inputs, all chunks at once.

With V', dW, S and dS in memory (notation and formulas in chunk_bwd.py) two kernels share the work, so that each keeps
its accumulators in registers: `_query_backward_kernel` has dQ and the part of dG that comes through the outputs,
`_key_backward_kernel` everything else. The diagonal of Y cancels in dG and is left out. Transposed products (dP^T,
dL^T) are computed anew with swapped operands: Triton 3.4 to 3.7.0 miscompiles a product with a transposed accumulator
on Hopper.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from .chunk_fwd import decay_between, gamma_of, load_G, load_tile, row_norm_factor, store_tile
from .chunk_prepare import _softplus, locate_chunk


@triton.jit
def _unit_rows(x, NORM: tl.constexpr):
    """Rows x / sqrt(|x|^2 + eps) in the type of x, and that factor; x and 1 without the norm."""
    factor = tl.zeros([x.shape[0]], dtype=tl.float32) + 1.0
    if NORM:
        factor = row_norm_factor(x)
        x = (x.to(tl.float32) * factor[:, None]).to(x.dtype)
    return x, factor


@triton.jit
def _raw_gradient(unit, factor, dx, NORM: tl.constexpr):
    """Gradient to the raw rows from the gradient dx to the unit rows."""
    if NORM:
        x = unit.to(tl.float32)
        dx = factor[:, None] * (dx - x * tl.sum(x * dx, axis=1)[:, None])
    return dx


@triton.jit(do_not_specialize=["T"])
def _query_backward_kernel(
    q, k, G, s, do, h, vn, dq, dG_out, cu_seqlens, row_of_chunk, first_chunk, scale, T, tokens,
    q_row, q_token, q_head, k_row, k_token, k_head, o_row, o_token, o_head,
    H: tl.constexpr, HV: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr, VARLEN: tl.constexpr, FULL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, query head): dQ, and dG_out [HO, B*T] = rowsum(Y) - colsum(Y) + rowsum(q dQ_inter)."""
    HO: tl.constexpr = HQ if HQ > HV else HV
    GROUP: tl.constexpr = HO // HV
    READS: tl.constexpr = HO // HQ
    pid = tl.program_id(0)
    query_head = pid % HQ
    c = pid // HQ
    row, first, flat, valid = locate_chunk(c, cu_seqlens, row_of_chunk, first_chunk, T, C, VARLEN)
    if valid <= 0:
        return
    i = tl.arange(0, C)
    d = tl.arange(0, BK)
    live = i < valid
    mK = live[:, None] & (d < K)[None, :]
    flat_i = flat + i
    dtype = k.dtype.element_ty
    causal = i[:, None] >= i[None, :]
    key_head = (query_head * READS // GROUP) // (HV // H)
    q_base = q + row * q_row + query_head.to(tl.int64) * q_head + first * q_token
    k_base = k + row * k_row + key_head.to(tl.int64) * k_head + first * k_token
    q_tile = load_tile(q_base + (i[:, None] * q_token + d[None, :]), mK, FULL)
    k_tile = load_tile(k_base + (i[:, None] * k_token + d[None, :]), mK, FULL)
    q_tile, f_i = _unit_rows(q_tile, NORM)
    k_tile, _ = _unit_rows(k_tile, NORM)
    dq_acc = tl.zeros([C, BK], dtype=tl.float32)
    for j in range(READS):
        out = query_head * READS + j
        head = out // GROUP
        dP = tl.zeros([C, C], dtype=tl.float32)
        dQ = tl.zeros([C, BK], dtype=tl.float32)
        for i_v in range(0, V, BV):
            e = i_v + tl.arange(0, BV)
            mV = live[:, None] & (e < V)[None, :]
            at = (flat * HV + head) * V + (i[:, None] * (HV * V) + e[None, :])
            state = (c.to(tl.int64) * HV + head) * (K * V) + (d[:, None] * V + e[None, :])
            do_at = do + row * o_row + out.to(tl.int64) * o_head + first * o_token + (i[:, None] * o_token + e[None, :])
            do_tile = load_tile(do_at, mV, FULL).to(dtype)
            S = load_tile(h + state, (d < K)[:, None] & (e < V)[None, :], FULL).to(dtype)
            vn_tile = load_tile(vn + at, mV, FULL).to(dtype)
            dQ += tl.dot(do_tile, tl.trans(S), input_precision=PRECISION)
            dP += tl.dot(do_tile, tl.trans(vn_tile), input_precision=PRECISION)
        G_i, s_i, _, _ = load_G(G, s, head.to(tl.int64) * tokens + flat, i, valid, FULL, PRECISION)
        Z = decay_between(G_i, s_i, causal) * dP * scale
        Y = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        Y = tl.where(i[:, None] > i[None, :], Z * Y, 0.0)
        dQ *= (gamma_of(G_i, s_i) * scale)[:, None]
        dG = tl.sum(Y, axis=1) - tl.sum(Y, axis=0) + tl.sum(q_tile.to(tl.float32) * dQ, axis=1)
        tl.store(dG_out + out.to(tl.int64) * tokens + flat_i, dG, mask=live)
        dq_acc += dQ + tl.dot(Z.to(dtype), k_tile, input_precision=PRECISION)
    dq_at = dq + (flat * HQ + query_head) * K + (i[:, None] * (HQ * K) + d[None, :])
    store_tile(dq_at, _raw_gradient(q_tile, f_i, dq_acc, NORM), mK, FULL)


@triton.jit(do_not_specialize=["T"])
def _key_backward_kernel(
    q, k, v, G, s, beta, do, h, dh, vn, dw, dG_out, g, A_log, dt_bias, dk, dv, dg, dbeta, gate_sums,
    cu_seqlens, row_of_chunk, first_chunk, scale, T, tokens,
    q_row, q_token, q_head, k_row, k_token, k_head, o_row, o_token, o_head, v_row, v_token, v_head,
    H: tl.constexpr, HV: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr, VARLEN: tl.constexpr, FULL: tl.constexpr,
    GATE: tl.constexpr, SIGMOID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, key head): dK, dV, dbeta, dg over all its states and their query heads."""
    HO: tl.constexpr = HQ if HQ > HV else HV
    GROUP: tl.constexpr = HO // HV
    READS: tl.constexpr = HO // HQ
    SHARE: tl.constexpr = HV // H
    pid = tl.program_id(0)
    key_head = pid % H
    c = pid // H
    row, first, flat, valid = locate_chunk(c, cu_seqlens, row_of_chunk, first_chunk, T, C, VARLEN)
    if valid <= 0:
        return
    i = tl.arange(0, C)
    d = tl.arange(0, BK)
    live = i < valid
    mK = live[:, None] & (d < K)[None, :]
    flat_i = flat + i
    dtype = k.dtype.element_ty
    strict = i[:, None] > i[None, :]
    anticausal = i[:, None] <= i[None, :]

    k_base = k + row * k_row + key_head.to(tl.int64) * k_head + first * k_token
    k_tile = load_tile(k_base + (i[:, None] * k_token + d[None, :]), mK, FULL)
    k_tile, r_i = _unit_rows(k_tile, NORM)
    dk_acc = tl.zeros([C, BK], dtype=tl.float32)
    for j in range(SHARE):
        head = key_head * SHARE + j
        rows = head.to(tl.int64) * tokens + flat
        G_i, s_i, fade, rev = load_G(G, s, rows, i, valid, FULL, PRECISION)
        b_i = load_tile(beta + rows + i, live, FULL)
        gamma = gamma_of(G_i, s_i)
        dG = tl.zeros([C], dtype=tl.float32)

        for m in range(GROUP):
            out = head * GROUP + m
            q_base = q + row * q_row + (out // READS).to(tl.int64) * q_head + first * q_token
            q_at = q_base + (i[:, None] * q_token + d[None, :])
            q_tile = load_tile(q_at, mK, FULL)
            q_tile, _ = _unit_rows(q_tile, NORM)
            dPt = tl.zeros([C, C], dtype=tl.float32)
            for i_v in range(0, V, BV):
                e = i_v + tl.arange(0, BV)
                mV = live[:, None] & (e < V)[None, :]
                at = (flat * HV + head) * V + (i[:, None] * (HV * V) + e[None, :])
                vn_tile = load_tile(vn + at, mV, FULL).to(dtype)
                do_at = (
                    do + row * o_row + out.to(tl.int64) * o_head + first * o_token + (i[:, None] * o_token + e[None, :])
                )
                do_tile = load_tile(do_at, mV, FULL).to(dtype)
                dPt += tl.dot(vn_tile, tl.trans(do_tile), input_precision=PRECISION)
            Zt = decay_between(-G_i, s_i, anticausal) * dPt * scale
            dk_acc += tl.dot(Zt.to(dtype), q_tile, input_precision=PRECISION)
            dG += load_tile(dG_out + out.to(tl.int64) * tokens + flat_i, live, FULL)

        dK_state = tl.zeros([C, BK], dtype=tl.float32)
        SdS = tl.zeros([BK], dtype=tl.float32)
        for i_v in range(0, V, BV):
            e = i_v + tl.arange(0, BV)
            mS = (d < K)[:, None] & (e < V)[None, :]
            at = (flat * HV + head) * V + (i[:, None] * (HV * V) + e[None, :])
            state = (c.to(tl.int64) * HV + head) * (K * V) + (d[:, None] * V + e[None, :])
            vn_cast = load_tile(vn + at, live[:, None] & (e < V)[None, :], FULL).to(dtype)
            dS = load_tile(dh + state, mS, FULL)
            S = load_tile(h + state, mS, FULL)
            SdS += tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=1)
            dK_state += tl.dot(vn_cast, tl.trans(dS.to(dtype)), input_precision=PRECISION)
        dK_state *= rev[:, None]
        # The last token's own write cancels in dG; leaving it out keeps small gate gradients exact.
        kept = tl.where(i == valid - 1, 0.0, tl.sum(k_tile.to(tl.float32) * dK_state, axis=1))
        dG -= kept
        dG_last = tl.sum(kept, axis=0) + fade * tl.sum(SdS, axis=0)
        dk_acc += dK_state

        dL = tl.zeros([C, C], dtype=tl.float32)
        dLt = tl.zeros([C, C], dtype=tl.float32)
        dK_read = tl.zeros([C, BK], dtype=tl.float32)
        db = tl.zeros([C], dtype=tl.float32)
        for i_v in range(0, V, BV):
            e = i_v + tl.arange(0, BV)
            mV = live[:, None] & (e < V)[None, :]
            at = (flat * HV + head) * V + (i[:, None] * (HV * V) + e[None, :])
            state = (c.to(tl.int64) * HV + head) * (K * V) + (d[:, None] * V + e[None, :])
            vn_tile = load_tile(vn + at, mV, FULL)
            dw_tile = load_tile(dw + at, mV, FULL)
            S = load_tile(h + state, (d < K)[:, None] & (e < V)[None, :], FULL)
            store_tile(dv + at, b_i[:, None] * dw_tile.to(tl.float32), mV, FULL)
            db += tl.sum(dw_tile.to(tl.float32) * vn_tile.to(tl.float32), axis=1)
            vn_cast = vn_tile.to(dtype)
            dw_cast = dw_tile.to(dtype)
            dK_read += tl.dot(dw_cast, tl.trans(S.to(dtype)), input_precision=PRECISION)
            dL += tl.dot(dw_cast, tl.trans(vn_cast), input_precision=PRECISION)
            dLt += tl.dot(vn_cast, tl.trans(dw_cast), input_precision=PRECISION)
        KK = tl.dot(k_tile, tl.trans(k_tile), input_precision=PRECISION)
        dL = decay_between(G_i, s_i, strict) * dL
        X = dL * KK
        dU_read = gamma * tl.sum(k_tile.to(tl.float32) * dK_read, axis=1)
        bX = b_i[:, None] * X
        dG += tl.sum(bX, axis=0) - tl.sum(bX, axis=1) - b_i * dU_read
        dk_acc += dK_read * -(gamma * b_i)[:, None]
        dLt = decay_between(-G_i, s_i, i[:, None] < i[None, :]) * dLt
        E = b_i[:, None] * dL + b_i[None, :] * dLt
        dk_acc -= tl.dot(E.to(dtype), k_tile, input_precision=PRECISION)

        dG += tl.where(i == valid - 1, dG_last, 0.0)
        dg_i = tl.cumsum(tl.where(live, dG, 0.0), axis=0, reverse=True)
        gates = flat_i * HV + head
        if SIGMOID:
            db = (1.0 - b_i) * db
        else:
            shut = live & (b_i == 0.0)
            db = db / tl.where(b_i == 0.0, 1.0, b_i)
            if tl.sum(shut.to(tl.int32), axis=0) > 0:
                # beta = 0: the same sum without the division, rowsum(dW (V - gamma U - (D K K^T) V')).
                db0 = -dU_read - tl.sum(X, axis=1)
                for i_v in range(0, V, BV):
                    e = i_v + tl.arange(0, BV)
                    mV = live[:, None] & (e < V)[None, :]
                    at = (flat * HV + head) * V + (i[:, None] * (HV * V) + e[None, :])
                    v_at = (
                        v
                        + row * v_row
                        + head.to(tl.int64) * v_head
                        + first * v_token
                        + (i[:, None] * v_token + e[None, :])
                    )
                    x = load_tile(v_at, mV, FULL).to(tl.float32)
                    db0 += tl.sum(x * load_tile(dw + at, mV, FULL).to(tl.float32), axis=1)
                db = tl.where(shut, db0, db)
        tl.store(dbeta + gates, db.to(dbeta.dtype.element_ty), mask=live)
        if GATE:
            x = load_tile(g + gates, live, FULL).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
            rate = tl.exp(tl.load(A_log + head).to(tl.float32))
            sums = gate_sums + (c.to(tl.int64) * HV + head) * 2
            tl.store(sums, tl.sum(tl.where(live, -rate * _softplus(x) * dg_i, 0.0), axis=0))
            dg_i = -rate / (1.0 + tl.exp(-x)) * dg_i
            tl.store(sums + 1, tl.sum(tl.where(live, dg_i, 0.0), axis=0))
        tl.store(dg + gates, dg_i.to(dg.dtype.element_ty), mask=live)
    dk_at = dk + (flat * H + key_head) * K + (i[:, None] * (H * K) + d[None, :])
    store_tile(dk_at, _raw_gradient(k_tile, r_i, dk_acc, NORM), mK, FULL)
