"""Gated delta rule over chunks, backward as a solve: (I + L) V' = W.

Notation of chunk_prepare.py and chunk_fwd.py; dS is the gradient of the state leaving the chunk.

    sequential, chunks in reverse (`_state_backward_kernel`):
        dV' = rev (K dS) + P^T dO;  dW = T^T dV';  dV = beta dW;  dU = -gamma dV
        dS <- e^{G_last} dS + K^T dU + scale Q^T (gamma dO)
    all chunks at once, from q, k, dO, V', dW, S, dS (`_input_backward_kernel`):
        dP = tril(dO V'^T);  dQ = scale gamma (dO S^T) + scale (D dP) K
        dL = -tril(dW V'^T, -1);  E = beta D dL
        dK = rev (V' dS^T) + dU S^T + scale (D dP)^T Q + (E + E^T) K
        dbeta = rowsum(dW V') / beta = rowsum(dW (V - gamma U - (D K K^T) V'))
        (beta = sigmoid(b): db = (1 - beta) rowsum(dW V'))
        X = dL L;  Y = dP P
        dG = rowsum(Y) - colsum(Y) + rowsum(X) - colsum(X) + rowsum(q dQ_inter) + rowsum(k (dU S^T)) - rowsum(k dK_state)
        dG_last += sum(k dK_state) + e^{G_last} <dS, S>;   dg = reverse cumsum of dG inside the chunk

The diagonal of Y cancels in dG and is left out. Transposed products (dP^T, dL^T) are computed anew with swapped
operands: Triton 3.4 to 3.7.0 miscompiles a product with a transposed accumulator on Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunk_fwd import decay_between, gamma_of, load_G, row_norm_factor
from .chunk_prepare import _softplus, locate_chunk, locate_row


@triton.jit(do_not_specialize=["T"])
def _state_backward_kernel(
    q, k, G, s, beta, r, Tm, do, dht, dh, dw, dh0, cu_seqlens, first_chunk, scale, T, tokens,
    q_row, q_token, q_head, k_row, k_token, k_head, o_row, o_token, o_head,
    H: tl.constexpr, HV: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr, VARLEN: tl.constexpr,
    FINAL: tl.constexpr, INITIAL: tl.constexpr, KEEP: tl.constexpr, SEGMENTS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, segment, state head, slice of V), chunks in reverse; writes dS and dW."""
    pid = tl.program_id(0)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v = pid % NV
    head = (pid // NV) % HV
    segment = pid // (NV * HV)
    n = segment // SEGMENTS
    row, begin, flat, length = locate_row(n, cu_seqlens, T, VARLEN)
    if VARLEN:
        chunk = tl.load(first_chunk + n).to(tl.int64)
    else:
        chunk = row * tl.cdiv(T, C)
    i = tl.arange(0, C)
    d = tl.arange(0, BK)
    e = i_v * BV + tl.arange(0, BV)
    md = d < K
    me = e < V
    mS = md[:, None] & me[None, :]
    at = d[:, None] * V + e[None, :]
    state = segment.to(tl.int64) * HV + head
    dS = tl.zeros([BK, BV], dtype=tl.float32)
    if FINAL:
        dS += tl.load(dht + state * K * V + at, mask=mS, other=0.0).to(tl.float32)

    GROUP: tl.constexpr = HQ // HV if HQ > HV else 1
    HO: tl.constexpr = HQ if HQ > HV else HV
    k_at = k + row * k_row + (head // (HV // H)) * k_head + begin * k_token + d[None, :]
    q_at = q + row * q_row + begin * q_token + d[None, :]
    do_at = do + row * o_row + begin * o_token + e[None, :]
    rows = head.to(tl.int64) * tokens + flat
    dtype = k.dtype.element_ty
    anticausal = i[:, None] <= i[None, :]
    count = tl.cdiv(length, C)
    share = tl.cdiv(count, SEGMENTS)
    start = (segment % SEGMENTS) * share
    stop = tl.minimum(start + share, count)
    for step in tl.range(start, stop, num_stages=STAGES):
        t = stop - 1 - (step - start)
        first = t * C
        valid = tl.minimum(length - first, C)
        live = i < valid
        token = (first + i).to(tl.int64)[:, None]
        k_tile = tl.load(k_at + token * k_token, mask=live[:, None] & md[None, :], other=0.0)
        T_tile = tl.load(Tm + ((chunk + t) * HV + head) * (C * C) + i[:, None] * C + i[None, :])
        G_i, s_i, fade, rev = load_G(G, s, rows + first, i, valid)
        beta_i = tl.load(beta + rows + first + i, mask=live, other=0.0)
        if NORM:
            r_i = tl.load(r + rows + first + i, mask=live, other=0.0)
        else:
            r_i = beta_i * 0.0 + 1.0
        gamma = gamma_of(G_i, s_i)

        dS_cast = dS.to(dtype)
        if KEEP:
            tl.store(dh + ((chunk + t) * HV + head) * (K * V) + at, dS_cast, mask=mS)
        decay = decay_between(-G_i, s_i, anticausal)
        dVn = tl.dot(k_tile, dS_cast, input_precision=PRECISION) * rev[:, None]
        dS = dS * fade
        for m in tl.static_range(GROUP):
            out = head * GROUP + m
            q_tile = tl.load(
                q_at + (out // (HO // HQ)) * q_head + token * q_token, mask=live[:, None] & md[None, :], other=0.0
            )
            do_tile = tl.load(do_at + out * o_head + token * o_token, mask=live[:, None] & me[None, :], other=0.0)
            f = gamma * 0.0 + scale
            if NORM:
                f = f * row_norm_factor(q_tile)
            Pt = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * decay * f[None, :]
            dVn += tl.dot(Pt.to(dtype), do_tile.to(dtype), input_precision=PRECISION)
            read = (f * gamma)[:, None] * do_tile.to(tl.float32)
            dS += tl.dot(tl.trans(q_tile), read.to(dtype), input_precision=PRECISION)
        dW = tl.dot(tl.trans(T_tile), (dVn * r_i[:, None]).to(dtype), input_precision=PRECISION)
        if KEEP:
            dw_at = dw + ((flat + token) * HV + head) * V + e[None, :]
            tl.store(dw_at, dW.to(dw.dtype.element_ty), mask=live[:, None] & me[None, :])
        dU = (-gamma * beta_i * r_i)[:, None] * dW
        dS += tl.dot(tl.trans(k_tile), dU.to(dtype), input_precision=PRECISION)
    if INITIAL:
        if KEEP:
            if segment % SEGMENTS == 0:
                tl.store(dh0 + (n.to(tl.int64) * HV + head) * K * V + at, dS, mask=mS)
        else:
            tl.store(dh0 + state * K * V + at, dS, mask=mS)


@triton.jit
def _unit_gradient(x, factor, dx, NORM: tl.constexpr):
    """Gradient to the raw rows x from the gradient dx to x * factor, factor = 1 / sqrt(|x|^2 + eps)."""
    if NORM:
        unit = x.to(tl.float32) * factor[:, None]
        dx = factor[:, None] * (dx - unit * tl.sum(unit * dx, axis=1)[:, None])
    return dx


@triton.jit(do_not_specialize=["T"])
def _input_backward_kernel(
    q, k, v, G, s, beta, r, do, h, dh, vn, dw, g, A_log, dt_bias, dq, dk, dv, dg, dbeta, gate_sums,
    cu_seqlens, row_of_chunk, first_chunk, scale, T, tokens,
    q_row, q_token, q_head, k_row, k_token, k_head, o_row, o_token, o_head, v_row, v_token, v_head,
    H: tl.constexpr, HV: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr, VARLEN: tl.constexpr,
    GATE: tl.constexpr, SIGMOID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, key head): all states of the key head, all query heads of each state."""
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
    token = (first + i)[:, None]
    flat_i = flat + i
    dtype = k.dtype.element_ty
    strict = i[:, None] > i[None, :]
    causal = i[:, None] >= i[None, :]
    anticausal = i[:, None] <= i[None, :]

    k_tile = tl.load(k + row * k_row + key_head * k_head + token * k_token + d[None, :], mask=mK, other=0.0)
    r_i = tl.zeros([C], dtype=tl.float32) + 1.0
    if NORM:
        r_i = tl.load(r + (key_head * SHARE).to(tl.int64) * tokens + flat_i, mask=live, other=0.0)
    dk_acc = tl.zeros([C, BK], dtype=tl.float32)
    dq_acc = tl.zeros([C, BK], dtype=tl.float32)
    for j in range(SHARE):
        head = key_head * SHARE + j
        rows = head.to(tl.int64) * tokens + flat
        G_i, s_i, fade, rev = load_G(G, s, rows, i, valid)
        b_i = tl.load(beta + rows + i, mask=live, other=0.0)
        gamma = gamma_of(G_i, s_i)
        D = decay_between(G_i, s_i, causal)
        Dt = decay_between(-G_i, s_i, anticausal)
        dG = tl.zeros([C], dtype=tl.float32)

        for m in range(GROUP):
            out = head * GROUP + m
            q_at = q + row * q_row + (out // READS) * q_head + token * q_token + d[None, :]
            q_tile = tl.load(q_at, mask=mK, other=0.0)
            f_i = tl.zeros([C], dtype=tl.float32) + 1.0
            if NORM:
                f_i = row_norm_factor(q_tile)
            dP = tl.zeros([C, C], dtype=tl.float32)
            dPt = tl.zeros([C, C], dtype=tl.float32)
            dQ = tl.zeros([C, BK], dtype=tl.float32)
            for i_v in range(0, V, BV):
                e = i_v + tl.arange(0, BV)
                mV = live[:, None] & (e < V)[None, :]
                mS = (d < K)[:, None] & (e < V)[None, :]
                at = (flat_i[:, None] * HV + head) * V + e[None, :]
                state = (c.to(tl.int64) * HV + head) * (K * V) + d[:, None] * V + e[None, :]
                vn_cast = tl.load(vn + at, mask=mV, other=0.0).to(dtype)
                S = tl.load(h + state, mask=mS, other=0.0)
                do_at = do + row * o_row + out * o_head + token * o_token + e[None, :]
                do_tile = tl.load(do_at, mask=mV, other=0.0).to(dtype)
                dQ += tl.dot(do_tile, tl.trans(S.to(dtype)), input_precision=PRECISION)
                dP += tl.dot(do_tile, tl.trans(vn_cast), input_precision=PRECISION)
                dPt += tl.dot(vn_cast, tl.trans(do_tile), input_precision=PRECISION)
            Z = D * dP * scale
            Zt = Dt * dPt * scale
            QK = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * f_i[:, None] * r_i[None, :]
            Y = tl.where(strict, Z * QK, 0.0)
            dG += tl.sum(Y, axis=1) - tl.sum(Y, axis=0)
            dQ *= (gamma * scale)[:, None]
            dG += tl.sum(q_tile.to(tl.float32) * dQ, axis=1) * f_i
            dQ += tl.dot((Z * r_i[None, :]).to(dtype), k_tile, input_precision=PRECISION)
            dk_acc += tl.dot((Zt * f_i[None, :]).to(dtype), q_tile, input_precision=PRECISION)
            dQ = _unit_gradient(q_tile, f_i, dQ, NORM)
            dq_at = dq + (flat_i[:, None] * HQ + out // READS) * K + d[None, :]
            if READS == 1:
                tl.store(dq_at, dQ.to(dq.dtype.element_ty), mask=mK)
            else:
                dq_acc += dQ
                if (j * GROUP + m + 1) % READS == 0:
                    tl.store(dq_at, dq_acc.to(dq.dtype.element_ty), mask=mK)
                    dq_acc = tl.zeros([C, BK], dtype=tl.float32)

        dK_state = tl.zeros([C, BK], dtype=tl.float32)
        SdS = tl.zeros([BK], dtype=tl.float32)
        for i_v in range(0, V, BV):
            e = i_v + tl.arange(0, BV)
            mS = (d < K)[:, None] & (e < V)[None, :]
            at = (flat_i[:, None] * HV + head) * V + e[None, :]
            state = (c.to(tl.int64) * HV + head) * (K * V) + d[:, None] * V + e[None, :]
            vn_cast = tl.load(vn + at, mask=live[:, None] & (e < V)[None, :], other=0.0).to(dtype)
            dS = tl.load(dh + state, mask=mS, other=0.0)
            S = tl.load(h + state, mask=mS, other=0.0)
            SdS += tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=1)
            dK_state += tl.dot(vn_cast, tl.trans(dS.to(dtype)), input_precision=PRECISION)
        dK_state *= rev[:, None]
        # The last token's own write cancels in dG; leaving it out keeps small gate gradients exact.
        kept = tl.where(i == valid - 1, 0.0, tl.sum(k_tile.to(tl.float32) * dK_state, axis=1) * r_i)
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
            at = (flat_i[:, None] * HV + head) * V + e[None, :]
            state = (c.to(tl.int64) * HV + head) * (K * V) + d[:, None] * V + e[None, :]
            vn_tile = tl.load(vn + at, mask=mV, other=0.0)
            dw_tile = tl.load(dw + at, mask=mV, other=0.0)
            S = tl.load(h + state, mask=(d < K)[:, None] & (e < V)[None, :], other=0.0)
            tl.store(dv + at, (b_i[:, None] * dw_tile.to(tl.float32)).to(dv.dtype.element_ty), mask=mV)
            db += tl.sum(dw_tile.to(tl.float32) * vn_tile.to(tl.float32), axis=1)
            vn_cast = vn_tile.to(dtype)
            dw_cast = dw_tile.to(dtype)
            dK_read += tl.dot(dw_cast, tl.trans(S.to(dtype)), input_precision=PRECISION)
            dL += tl.dot(dw_cast, tl.trans(vn_cast), input_precision=PRECISION)
            dLt += tl.dot(vn_cast, tl.trans(dw_cast), input_precision=PRECISION)
        KK = tl.dot(k_tile, tl.trans(k_tile), input_precision=PRECISION) * r_i[:, None] * r_i[None, :]
        X = tl.where(strict, D * dL * KK, 0.0)
        dU_read = gamma * r_i * tl.sum(k_tile.to(tl.float32) * dK_read, axis=1)
        bX = b_i[:, None] * X
        dG += tl.sum(bX, axis=0) - tl.sum(bX, axis=1) - b_i * dU_read
        dk_acc += dK_read * -(gamma * b_i)[:, None]
        E = tl.where(strict, b_i[:, None] * D * dL, b_i[None, :] * tl.where(i[:, None] < i[None, :], Dt * dLt, 0.0))
        dk_acc -= tl.dot((E * r_i[None, :]).to(dtype), k_tile, input_precision=PRECISION)

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
                    at = (flat_i[:, None] * HV + head) * V + e[None, :]
                    v_at = v + row * v_row + head * v_head + token * v_token + e[None, :]
                    x = tl.load(v_at, mask=mV, other=0.0).to(tl.float32)
                    db0 += tl.sum(x * tl.load(dw + at, mask=mV, other=0.0).to(tl.float32), axis=1)
                db = tl.where(shut, db0, db)
        tl.store(dbeta + gates, db.to(dbeta.dtype.element_ty), mask=live)
        if GATE:
            x = tl.load(g + gates, mask=live, other=0.0).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
            rate = tl.exp(tl.load(A_log + head).to(tl.float32))
            sums = gate_sums + (c.to(tl.int64) * HV + head) * 2
            tl.store(sums, tl.sum(tl.where(live, -rate * _softplus(x) * dg_i, 0.0), axis=0))
            dg_i = -rate / (1.0 + tl.exp(-x)) * dg_i
            tl.store(sums + 1, tl.sum(tl.where(live, dg_i, 0.0), axis=0))
        tl.store(dg + gates, dg_i.to(dg.dtype.element_ty), mask=live)
    dk_at = dk + (flat_i[:, None] * H + key_head) * K + d[None, :]
    tl.store(dk_at, _unit_gradient(k_tile, r_i, dk_acc, NORM).to(dk.dtype.element_ty), mask=mK)
