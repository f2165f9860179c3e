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

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from .chunk_prepare import L2_EPS, locate_chunk, locate_row


@triton.jit
def row_norm_factor(x):
    """1 / sqrt(|x|^2 + 1e-6) of each row."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=1) + L2_EPS)


@triton.jit
def load_tile(at, mask, FULL: tl.constexpr):
    """A tile, zero where the mask is off; FULL: the mask is known to be on everywhere and costs nothing."""
    return tl.load(at) if FULL else tl.load(at, mask=mask, other=0.0)


@triton.jit
def store_tile(at, x, mask, FULL: tl.constexpr):
    """Store a tile in the type of the memory, where the mask is on."""
    if FULL:
        tl.store(at, x.to(at.dtype.element_ty))
    else:
        tl.store(at, x.to(at.dtype.element_ty), mask=mask)


@triton.jit
def load_G(G, s, at, i, valid, FULL: tl.constexpr, PRECISION: tl.constexpr):
    """G and s of a chunk's rows, rows past the end like the last one; e^{G_last} and e^{G_last - G}.

    With products of 10 bits a shut gate is -128 in G (up to 3e-4 off in the decays behind it) and s is not needed.
    """
    G_i = load_tile(G + at + i, i < valid, FULL)
    s_i = load_tile(s + at + i, i < valid, FULL)
    G_last = tl.load(G + at + valid - 1)
    s_last = tl.load(s + at + valid - 1)
    if PRECISION == "tf32":
        G_i -= 128.0 * s_i
        G_last -= 128.0 * s_last
        s_i = tl.zeros_like(s_i)
        s_last = 0.0
    if not FULL:
        G_i = tl.where(i < valid, G_i, G_last)
        s_i = tl.where(i < valid, s_i, s_last)
    fade = tl.where(s_last > 0.0, 0.0, tl.exp(G_last))
    rev = tl.where(s_i == s_last, tl.exp(G_last - G_i), 0.0)
    return G_i, s_i, fade, rev


@triton.jit
def gamma_of(G, s):
    """e^G of each row."""
    return tl.where(s > 0.0, 0.0, tl.exp(G))


@triton.jit
def decay_between(G, s, causal):
    """D = e^{G_i - G_j} where `causal` (rows i, columns j), else 0."""
    return tl.where(causal & (s[:, None] == s[None, :]), tl.exp(tl.where(causal, G[:, None] - G[None, :], 0.0)), 0.0)


@triton.jit
def output_tile(
    q_tile, k_tile, S, Vn, G, s, r, scale, C: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O [C, BV] of one chunk and one query head, from S and V' in the matrix type."""
    i = tl.arange(0, C)
    causal = i[:, None] >= i[None, :]
    P = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    P = P * decay_between(G, s, causal)
    if NORM:
        P = P * r[None, :]
    out_tile = tl.dot(q_tile, S, input_precision=PRECISION) * gamma_of(G, s)[:, None]
    out_tile += tl.dot(P.to(Vn.dtype), Vn, input_precision=PRECISION)
    return out_tile * (row_norm_factor(q_tile) * scale)[:, None] if NORM else out_tile * scale


@triton.jit(do_not_specialize=["T"])
def _state_kernel(
    q, k, v, G, s, beta, r, Tm, h0, o, h, vn, ht, cu_seqlens, first_chunk, scale, T, tokens,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    H: tl.constexpr, HV: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr, VARLEN: tl.constexpr, FULL: tl.constexpr,
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
    chunk = tl.load(first_chunk + n).to(tl.int64) if VARLEN else row * tl.cdiv(T, C)
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
        S += load_tile(h0 + state * K * V + at, mS, FULL).to(tl.float32)

    GROUP: tl.constexpr = HQ // HV if HQ > HV else 1
    HO: tl.constexpr = HQ if HQ > HV else HV
    # Scalar 64-bit bases and small 32-bit offsets inside a tile: 64-bit tiles of addresses would cost registers.
    k_base = k + row * k_row + (head // (HV // H)).to(tl.int64) * k_head + begin * k_token
    v_base = v + row * v_row + head.to(tl.int64) * v_head + begin * v_token
    q_base = q + row * q_row + begin * q_token
    k_at = i[:, None] * k_token + d[None, :]
    v_at = i[:, None] * v_token + e[None, :]
    q_at = i[:, None] * q_token + d[None, :]
    vn_at = i[:, None] * (HV * V) + e[None, :]
    o_at = i[:, None] * (HO * V) + e[None, :]
    rows = head.to(tl.int64) * tokens + flat
    dtype = k.dtype.element_ty
    count = tl.cdiv(length, C)
    share = tl.cdiv(count, SEGMENTS)
    start = (segment % SEGMENTS) * share
    for t in tl.range(start, tl.minimum(start + share, count), num_stages=STAGES):
        first = t * C
        valid = C if FULL else tl.minimum(length - first, C)
        live = i < valid
        token = first.to(tl.int64)
        k_tile = load_tile(k_base + token * k_token + k_at, live[:, None] & md[None, :], FULL)
        if TRANSITION:
            v_tile = tl.zeros([C, BV], dtype=tl.float32)
        else:
            v_tile = load_tile(v_base + token * v_token + v_at, live[:, None] & me[None, :], FULL).to(tl.float32)
        T_tile = tl.load(Tm + ((chunk + t) * HV + head) * (C * C) + i[:, None] * C + i[None, :])
        G_i, s_i, fade, rev = load_G(G, s, rows + first, i, valid, FULL, PRECISION)
        beta_i = load_tile(beta + rows + first + i, live, FULL)
        r_i = load_tile(r + rows + first + i, live, FULL) if NORM else beta_i * 0.0 + 1.0

        S_cast = S.to(dtype)
        if KEEP:
            store_tile(h + ((chunk + t) * HV + head) * (K * V) + at, S_cast, mS, FULL)
        U = tl.dot(k_tile, S_cast, input_precision=PRECISION)
        W = beta_i[:, None] * (v_tile - (gamma_of(G_i, s_i) * r_i)[:, None] * U)
        Vn = tl.dot(T_tile, W.to(dtype), input_precision=PRECISION)
        if KEEP:
            vn_base = vn + ((flat + token) * HV + head) * V
            store_tile(vn_base + vn_at, Vn, live[:, None] & me[None, :], FULL)
        if OUTPUT:
            for m in tl.static_range(GROUP):
                out = head * GROUP + m
                q_from = q_base + (out // (HO // HQ)).to(tl.int64) * q_head + token * q_token
                q_tile = load_tile(q_from + q_at, live[:, None] & md[None, :], FULL)
                out_tile = output_tile(q_tile, k_tile, S_cast, Vn.to(dtype), G_i, s_i, r_i, scale, C, NORM, PRECISION)
                o_base = o + ((flat + token) * HO + out) * V
                store_tile(o_base + o_at, out_tile, live[:, None] & me[None, :], FULL)
        written = (rev * r_i)[:, None] * Vn
        S = S * fade + tl.dot(tl.trans(k_tile), written.to(dtype), input_precision=PRECISION)
    if FINAL:
        if KEEP or OUTPUT:
            if segment % SEGMENTS == SEGMENTS - 1:
                tl.store(ht + (n.to(tl.int64) * HV + head) * K * V + at, S, mask=mS)
        else:
            tl.store(ht + state * K * V + at, S, mask=mS)


@triton.jit(do_not_specialize=["T"])
def _output_kernel(
    q, k, G, s, r, h, vn, o, cu_seqlens, row_of_chunk, first_chunk, scale, T, tokens,
    q_row, q_token, q_head, k_row, k_token, k_head,
    H: tl.constexpr, HV: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr, VARLEN: tl.constexpr, FULL: tl.constexpr,
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
    q_base = q + row * q_row + (out // (HO // HQ)).to(tl.int64) * q_head + first * q_token
    k_base = k + row * k_row + (head // (HV // H)).to(tl.int64) * k_head + first * k_token
    q_at = q_base + (i[:, None] * q_token + d[None, :])
    k_at = k_base + (i[:, None] * k_token + d[None, :])
    q_tile = load_tile(q_at, live[:, None] & md[None, :], FULL)
    k_tile = load_tile(k_at, live[:, None] & md[None, :], FULL)
    dtype = k.dtype.element_ty
    vn_at = vn + (flat * HV + head) * V + (i[:, None] * (HV * V) + e[None, :])
    Vn = load_tile(vn_at, live[:, None] & me[None, :], FULL)
    S_at = h + (c.to(tl.int64) * HV + head) * (K * V) + (d[:, None] * V + e[None, :])
    S = load_tile(S_at, md[:, None] & me[None, :], FULL)
    rows = head.to(tl.int64) * tokens + flat
    G_i, s_i, _, _ = load_G(G, s, rows, i, valid, FULL, PRECISION)
    r_i = load_tile(r + rows + i, live, FULL) if NORM else G_i * 0.0 + 1.0
    out_tile = output_tile(q_tile, k_tile, S.to(dtype), Vn.to(dtype), G_i, s_i, r_i, scale, C, NORM, PRECISION)
    o_at = o + (flat * HO + out) * V + (i[:, None] * (HO * V) + e[None, :])
    store_tile(o_at, out_tile, live[:, None] & me[None, :], FULL)
