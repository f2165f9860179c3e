"""Gated delta rule over chunks, forward: the state pass and the outputs.

Per state head, with C tokens a chunk, S [K, V] the state entering the chunk, G, D, T as in chunk_prepare.py,
gamma = e^G, rev = e^{G_last - G} and W, R, U [C, V]:

    U = K S;  R = V - gamma U;  W = beta R;  V' = T W
    P = scale D (Q K^T);  O = scale gamma (Q S) + P V';  S <- e^{G_last} S + K^T (rev V')

One program walks a sequence chunk by chunk with its [K, BV] slice of the state in registers. It writes O itself
(nothing but T ever reaches memory), or it writes S and V' for the backward pass and for `_output_kernel`, which
takes all chunks at once. When sequences x heads do not fill the chip a sequence is cut into segments that run at
once (chunk_segment.py). Computed tiles are always right-hand operands of matrix products, or bf16 left ones that
were just made: transposing an accumulator into a product is miscompiled by Triton 3.4 to 3.7.0 on Hopper.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .chunk_prepare import L2_EPS, Chunks, Prepared, locate_chunk, locate_row


@triton.jit
def row_norm_factor(x):
    """1 / sqrt(|x|^2 + 1e-6) of each row."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=1) + L2_EPS)


@triton.jit
def load_G(G_rows, i, valid):
    """G of a chunk's rows, its last value, and the rows past the end set to that last value."""
    G = tl.load(G_rows + i, mask=i < valid, other=0.0)
    last = tl.load(G_rows + valid - 1)
    return tl.where(i < valid, G, last), last


@triton.jit
def output_tile(
    q_tile, k_tile, S, Vn, G, r, scale, C: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O [C, BV] of one chunk and one query head, from S and V' in the matrix type."""
    i = tl.arange(0, C)
    causal = i[:, None] >= i[None, :]
    P = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    P = P * tl.where(causal, tl.exp(tl.where(causal, G[:, None] - G[None, :], 0.0)), 0.0)
    if NORM:
        P = P * r[None, :]
    O = tl.dot(q_tile, S, input_precision=PRECISION) * tl.exp(G)[:, None]
    O += tl.dot(P.to(Vn.dtype), Vn, input_precision=PRECISION)
    if NORM:
        O = O * (row_norm_factor(q_tile) * scale)[:, None]
    else:
        O = O * scale
    return O


@triton.jit(do_not_specialize=["T"])
def _state_kernel(
    q, k, v, G, beta, r, Tm, h0, o, h, vn, ht, cu_seqlens, first_chunk, scale, T, tokens,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    H: tl.constexpr, HV: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr, VARLEN: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, OUTPUT: tl.constexpr, KEEP: tl.constexpr,
    TRANSITION: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program a (sequence, segment, state head, slice of V), chunk after chunk."""
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
    S = tl.zeros([BK, BV], dtype=tl.float32)
    if TRANSITION:
        S += tl.where(d[:, None] == e[None, :], 1.0, 0.0)
    if INITIAL:
        S += tl.load(h0 + state * K * V + at, mask=mS, other=0.0).to(tl.float32)

    GROUP: tl.constexpr = HQ // HV if HQ > HV else 1
    HO: tl.constexpr = HQ if HQ > HV else HV
    k_at = k + row * k_row + (head // (HV // H)) * k_head + begin * k_token + d[None, :]
    v_at = v + row * v_row + head * v_head + begin * v_token + e[None, :]
    q_at = q + row * q_row + begin * q_token + d[None, :]
    rows = head.to(tl.int64) * tokens + flat
    dtype = k.dtype.element_ty
    count = tl.cdiv(length, C)
    share = tl.cdiv(count, SEGMENTS)
    start = (segment % SEGMENTS) * share
    for t in tl.range(start, tl.minimum(start + share, count), num_stages=STAGES):
        first = t * C
        valid = tl.minimum(length - first, C)
        live = i < valid
        token = (first + i).to(tl.int64)[:, None]
        k_tile = tl.load(k_at + token * k_token, mask=live[:, None] & md[None, :], other=0.0)
        if TRANSITION:
            v_tile = tl.zeros([C, BV], dtype=tl.float32)
        else:
            v_tile = tl.load(v_at + token * v_token, mask=live[:, None] & me[None, :], other=0.0).to(tl.float32)
        T_tile = tl.load(Tm + ((chunk + t) * HV + head) * (C * C) + i[:, None] * C + i[None, :])
        G_i, G_last = load_G(G + rows + first, i, valid)
        beta_i = tl.load(beta + rows + first + i, mask=live, other=0.0)
        if NORM:
            r_i = tl.load(r + rows + first + i, mask=live, other=0.0)
        else:
            r_i = beta_i * 0.0 + 1.0

        S_cast = S.to(dtype)
        if KEEP:
            tl.store(h + ((chunk + t) * HV + head) * (K * V) + at, S_cast, mask=mS)
        U = tl.dot(k_tile, S_cast, input_precision=PRECISION)
        W = beta_i[:, None] * (v_tile - (tl.exp(G_i) * r_i)[:, None] * U)
        Vn = tl.dot(T_tile, W.to(dtype), input_precision=PRECISION)
        if KEEP:
            vn_at = vn + ((flat + token) * HV + head) * V + e[None, :]
            tl.store(vn_at, Vn.to(vn.dtype.element_ty), mask=live[:, None] & me[None, :])
        if OUTPUT:
            for m in tl.static_range(GROUP):
                out = head * GROUP + m
                q_tile = tl.load(
                    q_at + (out // (HO // HQ)) * q_head + token * q_token, mask=live[:, None] & md[None, :], other=0.0
                )
                O = output_tile(q_tile, k_tile, S_cast, Vn.to(dtype), G_i, r_i, scale, C, NORM, PRECISION)
                o_at = o + ((flat + token) * HO + out) * V + e[None, :]
                tl.store(o_at, O.to(o.dtype.element_ty), mask=live[:, None] & me[None, :])
        fade = (tl.exp(G_last - G_i) * r_i)[:, None] * Vn
        S = S * tl.exp(G_last) + tl.dot(tl.trans(k_tile), fade.to(dtype), input_precision=PRECISION)
    if FINAL:
        if KEEP or OUTPUT:
            if segment % SEGMENTS == SEGMENTS - 1:
                tl.store(ht + (n.to(tl.int64) * HV + head) * K * V + at, S, mask=mS)
        else:
            tl.store(ht + state * K * V + at, S, mask=mS)


@triton.jit(do_not_specialize=["T"])
def _output_kernel(
    q, k, G, r, h, vn, o, cu_seqlens, row_of_chunk, first_chunk, scale, T, tokens,
    q_row, q_token, q_head, k_row, k_token, k_head,
    H: tl.constexpr, HV: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr, VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, output head, slice of V), from S and V' in memory."""
    HO: tl.constexpr = HQ if HQ > HV else HV
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = pid % NV
    out = (pid // NV) % HO
    c = pid // (NV * HO)
    head = out // (HO // HV)
    row, first, flat, valid = locate_chunk(c, cu_seqlens, row_of_chunk, first_chunk, T, C, VARLEN)
    if valid <= 0:
        return
    i = tl.arange(0, C)
    d = tl.arange(0, BK)
    e = i_v * BV + tl.arange(0, BV)
    live = i < valid
    md = d < K
    me = e < V
    token = (first + i)[:, None]
    q_at = q + row * q_row + (out // (HO // HQ)) * q_head + token * q_token + d[None, :]
    k_at = k + row * k_row + (head // (HV // H)) * k_head + token * k_token + d[None, :]
    q_tile = tl.load(q_at, mask=live[:, None] & md[None, :], other=0.0)
    k_tile = tl.load(k_at, mask=live[:, None] & md[None, :], other=0.0)
    dtype = k.dtype.element_ty
    flat_i = flat + i
    Vn = tl.load(vn + (flat_i[:, None] * HV + head) * V + e[None, :], mask=live[:, None] & me[None, :], other=0.0)
    S_at = h + (c.to(tl.int64) * HV + head) * (K * V) + d[:, None] * V + e[None, :]
    S = tl.load(S_at, mask=md[:, None] & me[None, :], other=0.0)
    rows = head.to(tl.int64) * tokens + flat
    G_i, _ = load_G(G + rows, i, valid)
    if NORM:
        r_i = tl.load(r + rows + i, mask=live, other=0.0)
    else:
        r_i = G_i * 0.0 + 1.0
    O = output_tile(q_tile, k_tile, S.to(dtype), Vn.to(dtype), G_i, r_i, scale, C, NORM, PRECISION)
    o_at = o + (flat_i[:, None] * HO + out) * V + e[None, :]
    tl.store(o_at, O.to(o.dtype.element_ty), mask=live[:, None] & me[None, :])
