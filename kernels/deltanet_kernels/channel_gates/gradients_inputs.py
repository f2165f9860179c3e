"""Backward, all chunks in parallel: the gradients of q, k, p, g and beta.

    d reads = dO S^T;    d erases = -dW S^T;    d writes = V' dS^T                  (rows of the state's gradients)
    dq = scale (e^G d reads + sum_j dP_ij k_j e^{G_i - G_j})
    d(beta p) = e^G d erases + sum_j dL_ij k_j e^{G_i - G_j};    dp = beta d(beta p);    dbeta += p d(beta p)
    dk = e^{G_last - G} d writes + sum_i (dP_ij scale q_i + dL_ij beta_i p_i) e^{G_i - G_j}

Every exponent is a sum of g over consecutive tokens, so per channel

    dG = reads * d reads + erases * d erases - writes * d writes + (pairs: at i what is taken away at j)
    dg = reverse cumsum of dG + colsum(writes * d writes) + fade rowsum(S * dS)

The terms of dG cancel, so they are float32 products of the same rounded rows that the gradients come from.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from deltanet_kernels.channel_gates.decay import STRONGEST, chunk_sums, pair_gradients, since_start, until_end
from deltanet_kernels.common.sequences import locate_chunk


class InputsForm(NamedTuple):
    """The compile-time constant FORM of `input_gradients_kernel`."""

    HQ: int
    H: int
    HP: int
    """Heads of the erase key."""
    HV: int
    K: int
    V: int
    KP: int
    """K padded to tiles of BK; VP is V, to those of BV."""
    VP: int
    BK: int
    BV: int
    C: int
    ERASE: bool
    OWN_KEY: bool
    VARLEN: bool
    """Sequences are packed."""
    LIMIT: float
    """A factor e^x with x up to this is exact enough (decay.py)."""
    PRECISION: str


@triton.jit(do_not_specialize=["T"])
def input_gradients_kernel(
    q, k, p, g, beta, do, reads, erases, writes, fade, h, dh, vn, dw, dP, dL, dq, dk, dp, dg, dbeta,
    cu_seqlens, row_of_chunk, first_chunk, scale, T, tokens,
    q_row, q_token: tl.constexpr, q_head, k_row, k_token: tl.constexpr, k_head, p_row, p_token: tl.constexpr, p_head,
    o_row, o_token: tl.constexpr, o_head,
    FORM: tl.constexpr,
):  # fmt: skip
    """Write dq [B, T, HO, K], dk, dp, dg [B, T, HV, K]; one program per (chunk, state head, slice of K).

    dbeta [1 + slices, B * T, HV] gets the slice's part of the sum over K, after the part of gradients_pairs.py.

    Without OWN_KEY p is k, and dk includes dp.
    """
    HQ: tl.constexpr = FORM.HQ
    HV: tl.constexpr = FORM.HV
    K: tl.constexpr = FORM.K
    KP: tl.constexpr = FORM.KP
    VP: tl.constexpr = FORM.VP
    BK: tl.constexpr = FORM.BK
    BV: tl.constexpr = FORM.BV
    C: tl.constexpr = FORM.C
    VARLEN: tl.constexpr = FORM.VARLEN
    LIMIT: tl.constexpr = FORM.LIMIT
    PRECISION: tl.constexpr = FORM.PRECISION
    HO: tl.constexpr = HQ if HQ > HV else HV
    GROUP: tl.constexpr = HO // HV
    NK: tl.constexpr = KP // BK
    pid = tl.program_id(0)
    i_k = pid % NK
    head = (pid // NK) % HV
    c = (pid // (NK * HV)).to(tl.int64)
    row, first, flat, valid = locate_chunk(pid // (NK * HV), cu_seqlens, row_of_chunk, first_chunk, T, C, VARLEN)
    if valid <= 0:
        return
    i = tl.arange(0, C)
    live = i < valid
    state = c * HV + head
    dtype: tl.constexpr = writes.dtype.element_ty
    k_base = k + row * k_row + (head // (HV // FORM.H)).to(tl.int64) * k_head + first * k_token
    p_base = p + row * p_row + (head // (HV // FORM.HP)).to(tl.int64) * p_head + first * p_token
    strength = tl.load(beta + (flat + i) * HV + head, mask=live, other=0.0).to(tl.float32)
    own = (flat * HV + head) * K
    d = i_k * BK + tl.arange(0, BK)
    m = live[:, None] & (d < K)[None, :]
    rows_at = i[:, None] * KP + d[None, :]
    own_at = i[:, None] * (HV * K) + d[None, :]
    gate = tl.load(g + own + own_at, mask=m, other=0.0).to(tl.float32)
    gate = tl.maximum(gate, STRONGEST)
    G, e_pairs, products = chunk_sums(gate, i, C, LIMIT)
    k_tile = tl.load(k_base + (i[:, None] * k_token + d[None, :]), mask=m, other=0.0).to(tl.float32)
    dk_tile = tl.zeros([C, BK], dtype=tl.float32)
    dG = tl.zeros([C, BK], dtype=tl.float32)

    for x in range(GROUP):
        out = head * GROUP + x
        own_out = c * HO + out
        q_base = q + row * q_row + (out // (HO // HQ)).to(tl.int64) * q_head + first * q_token
        q_tile = tl.load(q_base + (i[:, None] * q_token + d[None, :]), mask=m, other=0.0).to(tl.float32) * scale
        dx, dy, dG_pairs = pair_gradients(
            q_tile, k_tile, gate, G, e_pairs, products, dP + own_out * (C * C), i, BK, C, LIMIT, dtype, PRECISION
        )  # fmt: skip
        same = tl.load(dP + own_out * (C * C) + i * (C + 1)).to(tl.float32)[:, None]
        dx += same * k_tile
        dk_tile += dy + same * q_tile
        dG += dG_pairs
        d_reads = tl.zeros([C, BK], dtype=tl.float32)
        do_base = do + row * o_row + out.to(tl.int64) * o_head + first * o_token
        for v_start in range(0, VP, BV):
            e = v_start + tl.arange(0, BV)
            mV = live[:, None] & (e < FORM.V)[None, :]
            do_tile = tl.load(do_base + (i[:, None] * o_token + e[None, :]), mask=mV, other=0.0).to(dtype)
            S = tl.load(h + state * (VP * KP) + (e[:, None] * KP + d[None, :])).to(dtype)
            d_reads = tl.dot(do_tile, S, d_reads, input_precision=PRECISION)
        dG += tl.load(reads + own_out * (C * KP) + rows_at).to(tl.float32) * d_reads
        dx += d_reads * since_start(gate, G, products, i, dtype, PRECISION)
        q_at = i[:, None] * (HO * K) + d[None, :]
        tl.store(dq + (flat * HO + out) * K + q_at, (dx * scale).to(dq.dtype.element_ty), mask=m)

    if FORM.ERASE:
        p_tile = tl.load(p_base + (i[:, None] * p_token + d[None, :]), mask=m, other=0.0).to(tl.float32)
        dx, dy, dG_pairs = pair_gradients(
            p_tile * strength[:, None], k_tile, gate, G, e_pairs, products, dL + state * (C * C), i, BK, C, LIMIT,
            dtype, PRECISION,
        )  # fmt: skip
        dk_tile += dy
        dG += dG_pairs
        d_erases = tl.zeros([C, BK], dtype=tl.float32)
        for v_start in range(0, VP, BV):
            e = v_start + tl.arange(0, BV)
            w_tile = tl.load(dw + state * (C * VP) + (i[:, None] * VP + e[None, :])).to(dtype)
            S = tl.load(h + state * (VP * KP) + (e[:, None] * KP + d[None, :])).to(dtype)
            d_erases = tl.dot(w_tile, S, d_erases, input_precision=PRECISION)
        dG -= tl.load(erases + state * (C * KP) + rows_at).to(tl.float32) * d_erases
        dx -= d_erases * since_start(gate, G, products, i, dtype, PRECISION)
        p_tile = tl.load(p_base + (i[:, None] * p_token + d[None, :]), mask=m, other=0.0).to(tl.float32)
        part = dbeta + (1 + i_k).to(tl.int64) * tokens * HV
        tl.store(part + (flat + i) * HV + head, tl.sum(p_tile * dx, axis=1), mask=live)
        dx *= strength[:, None]
        if FORM.OWN_KEY:
            tl.store(dp + own + own_at, dx.to(dp.dtype.element_ty), mask=m)
        else:
            dk_tile += dx

    d_writes = tl.zeros([C, BK], dtype=tl.float32)
    d_fade = tl.zeros([BK], dtype=tl.float32)
    for v_start in range(0, VP, BV):
        e = v_start + tl.arange(0, BV)
        S_at = e[:, None] * KP + d[None, :]
        dS = tl.load(dh + state * (VP * KP) + S_at)
        n_tile = tl.load(vn + state * (C * VP) + (i[:, None] * VP + e[None, :])).to(dtype)
        d_writes = tl.dot(n_tile, dS.to(dtype), d_writes, input_precision=PRECISION)
        S = tl.load(h + state * (VP * KP) + S_at)
        d_fade += tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=0)
    kept = tl.load(writes + state * (C * KP) + rows_at).to(tl.float32) * d_writes
    dk_tile += d_writes * until_end(gate, G, products, i, dtype, PRECISION)
    tl.store(dk + own + own_at, dk_tile.to(dk.dtype.element_ty), mask=m)
    d_last = tl.sum(kept, axis=0) + tl.load(fade + state * KP + d) * d_fade
    dg_tile = tl.cumsum(dG - kept, axis=0, reverse=True) + d_last[None, :]
    tl.store(dg + own + own_at, dg_tile.to(dg.dtype.element_ty), mask=m)
