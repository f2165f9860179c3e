"""Gated delta rule over chunks, backward as a solve: (I + L) V' = W.

Notation of chunk_prepare.py and chunk_fwd.py; dS is the gradient of the state leaving the chunk.

    sequential, chunks in reverse (`_state_backward_kernel`):
        dV' = rev (K dS) + P^T dO;  dW = T^T dV';  dV = beta dW;  dU = -gamma dV
        dS <- e^{G_last} dS + K^T dU + scale Q^T (gamma dO)
    all chunks at once, from q, k, dO, V', dW, S, dS (chunk_bwd_inputs.py):
        dP = tril(dO V'^T);  dQ = scale gamma (dO S^T) + scale (D dP) K
        dL = -tril(dW V'^T, -1);  E = beta D dL
        dK = rev (V' dS^T) + dU S^T + scale (D dP)^T Q + (E + E^T) K
        dbeta = rowsum(dW V') / beta = rowsum(dW (V - gamma U - (D K K^T) V'))
        (beta = sigmoid(b): db = (1 - beta) rowsum(dW V'))
        X = dL L;  Y = dP P
        dG = rowsum(Y) - colsum(Y) + rowsum(X) - colsum(X)
             + rowsum(q dQ_inter) + rowsum(k (dU S^T)) - rowsum(k dK_state)
        dG_last += sum(k dK_state) + e^{G_last} <dS, S>;   dg = reverse cumsum of dG inside the chunk

The diagonal of Y cancels in dG and is left out. Transposed products (dP^T, dL^T) are computed anew with swapped
operands: Triton 3.4 to 3.7.0 miscompiles a product with a transposed accumulator on Hopper.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from .chunk_fwd import decay_between, gamma_of, load_G, load_tile, row_norm_factor, store_tile
from .chunk_prepare import locate_row


@triton.jit(do_not_specialize=["T"])
def _state_backward_kernel(
    q, k, G, s, beta, r, Tm, do, dht, dh, dw, dh0, cu_seqlens, first_chunk, scale, T, tokens,
    q_row, q_token, q_head, k_row, k_token, k_head, o_row, o_token, o_head,
    H: tl.constexpr, HV: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr, VARLEN: tl.constexpr, FULL: tl.constexpr,
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
    chunk = tl.load(first_chunk + n).to(tl.int64) if VARLEN else row * tl.cdiv(T, C)
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
        dS += load_tile(dht + state * K * V + at, mS, FULL).to(tl.float32)

    GROUP: tl.constexpr = HQ // HV if HQ > HV else 1
    HO: tl.constexpr = HQ if HQ > HV else HV
    k_base = k + row * k_row + (head // (HV // H)).to(tl.int64) * k_head + begin * k_token
    q_base = q + row * q_row + begin * q_token
    do_base = do + row * o_row + begin * o_token
    k_at = i[:, None] * k_token + d[None, :]
    q_at = i[:, None] * q_token + d[None, :]
    do_at = i[:, None] * o_token + e[None, :]
    dw_at = i[:, None] * (HV * V) + e[None, :]
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
        valid = C if FULL else tl.minimum(length - first, C)
        live = i < valid
        token = first.to(tl.int64)
        k_tile = load_tile(k_base + token * k_token + k_at, live[:, None] & md[None, :], FULL)
        T_tile = tl.load(Tm + ((chunk + t) * HV + head) * (C * C) + i[:, None] * C + i[None, :])
        G_i, s_i, fade, rev = load_G(G, s, rows + first, i, valid, FULL, PRECISION)
        beta_i = load_tile(beta + rows + first + i, live, FULL)
        r_i = load_tile(r + rows + first + i, live, FULL) if NORM else beta_i * 0.0 + 1.0
        gamma = gamma_of(G_i, s_i)

        dS_cast = dS.to(dtype)
        if KEEP:
            store_tile(dh + ((chunk + t) * HV + head) * (K * V) + at, dS_cast, mS, FULL)
        decay = decay_between(-G_i, s_i, anticausal)
        dVn = tl.dot(k_tile, dS_cast, input_precision=PRECISION) * rev[:, None]
        dS = dS * fade
        for m in tl.static_range(GROUP):
            out = head * GROUP + m
            q_from = q_base + (out // (HO // HQ)).to(tl.int64) * q_head + token * q_token
            q_tile = load_tile(q_from + q_at, live[:, None] & md[None, :], FULL)
            do_from = do_base + out.to(tl.int64) * o_head + token * o_token
            do_tile = load_tile(do_from + do_at, live[:, None] & me[None, :], FULL)
            f = gamma * 0.0 + scale
            if NORM:
                f = f * row_norm_factor(q_tile)
            Pt = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * decay * f[None, :]
            dVn += tl.dot(Pt.to(dtype), do_tile.to(dtype), input_precision=PRECISION)
            read = (f * gamma)[:, None] * do_tile.to(tl.float32)
            dS += tl.dot(tl.trans(q_tile), read.to(dtype), input_precision=PRECISION)
        dW = tl.dot(tl.trans(T_tile), (dVn * r_i[:, None]).to(dtype), input_precision=PRECISION)
        if KEEP:
            dw_base = dw + ((flat + token) * HV + head) * V
            store_tile(dw_base + dw_at, dW, live[:, None] & me[None, :], FULL)
        dU = (-gamma * beta_i * r_i)[:, None] * dW
        dS += tl.dot(tl.trans(k_tile), dU.to(dtype), input_precision=PRECISION)
    if INITIAL:
        if KEEP:
            if segment % SEGMENTS == 0:
                tl.store(dh0 + (n.to(tl.int64) * HV + head) * K * V + at, dS, mask=mS)
        else:
            tl.store(dh0 + state * K * V + at, dS, mask=mS)
