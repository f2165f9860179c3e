"""First stage of the chunks: scores P and L, and the decayed rows that the later stages multiply.

One program per (chunk, output head) computes P and reads; the first head of each state also computes L, erases, writes
and fade. All tiles are stored as [chunks, heads, C, KP] with zeros past the end of a sequence and past K, so that the
later stages load complete tiles.

How many products serve the pairs of a chunk (decay.py) is decided per slice of BK channels. Each of the ways loads its
own tiles, so that none keeps registers for another.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.channel_gates.decay import (
    MANY,
    ONE,
    STRONGEST,
    TWO,
    between_halves,
    chunk_sums,
    half_factors,
    since_start,
    until_end,
)
from deltanet_kernels.common.sequences import locate_chunk


@triton.jit
def add_product(M, rows, columns, same, TWO_PRODUCTS: tl.constexpr, PRECISION: tl.constexpr):
    """M [C, C] with rows times columns added, within each half if two products serve the chunk."""
    if TWO_PRODUCTS:
        return M + tl.where(same, tl.dot(rows, columns, input_precision=PRECISION), 0.0)
    return tl.dot(rows, columns, M, input_precision=PRECISION)


@triton.jit
def in_products(
    P, L, q_at, k_at, p_at, reads_at, erases_at, writes_at, m, strength, scale, g, G, e, i, both, of_state,
    PRODUCTS: tl.constexpr, C: tl.constexpr, dtype: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P, L [C, C] with the ONE or TWO products of a slice added; above the diagonal they mean nothing. Stores rows."""
    q = tl.load(q_at, mask=m, other=0.0).to(tl.float32) * scale
    k = tl.load(k_at, mask=m, other=0.0).to(tl.float32)
    row, since = tl.exp(e), since_start(g, G, PRODUCTS, i, dtype, PRECISION)
    columns = tl.trans((k * tl.exp(-e)).to(dtype))
    same = (i[:, None] ^ i[None, :]) < C // 2
    P = add_product(P, (q * row).to(dtype), columns, same, PRODUCTS == TWO, PRECISION)
    tl.store(reads_at, (q * since).to(dtype))
    if PRODUCTS == TWO:
        across, columns_across = between_halves(G, i, C)
        columns_across = tl.trans((k * columns_across).to(dtype))
        P = tl.dot((q * across).to(dtype), columns_across, P, input_precision=PRECISION)
    if both:
        p = tl.load(p_at, mask=m, other=0.0).to(tl.float32) * strength[:, None]
        L = add_product(L, (p * row).to(dtype), columns, same, PRODUCTS == TWO, PRECISION)
        tl.store(erases_at, (p * since).to(dtype))
        if PRODUCTS == TWO:
            L = tl.dot((p * across).to(dtype), columns_across, L, input_precision=PRECISION)
    if of_state:
        until = until_end(g, G, PRODUCTS, i, dtype, PRECISION)
        tl.store(writes_at, (k * until).to(dtype))
    return P, L


@triton.jit
def in_halves(
    P, L, q_at, k_at, p_at, reads_at, erases_at, writes_at, m, strength, scale, g, G, i, both, of_state,
    C: tl.constexpr, LIMIT: tl.constexpr, dtype: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `in_products`, for any gates."""
    since = since_start(g, G, MANY, i, dtype, PRECISION)
    q = tl.load(q_at, mask=m, other=0.0).to(tl.float32) * scale
    tl.store(reads_at, (q * since).to(dtype))
    if both:
        p = tl.load(p_at, mask=m, other=0.0).to(tl.float32) * strength[:, None]
        tl.store(erases_at, (p * since).to(dtype))
    if of_state:
        until = until_end(g, G, MANY, i, dtype, PRECISION)
        k = tl.load(k_at, mask=m, other=0.0).to(tl.float32)
        tl.store(writes_at, (k * until).to(dtype))
    h = tl.full([], C // 2, tl.int32)
    while h > 0:
        row, column, served = half_factors(g, h, i, LIMIT, dtype, PRECISION)
        columns = tl.trans((tl.load(k_at, mask=m, other=0.0).to(tl.float32) * column).to(dtype))
        here = (i[:, None] > i[None, :]) & ((i[:, None] ^ i[None, :]) < 2 * h)
        rows = tl.load(q_at, mask=m, other=0.0).to(tl.float32) * scale * row
        P += tl.where(here, tl.dot(rows.to(dtype), columns, input_precision=PRECISION), 0.0)
        if both:
            rows = tl.load(p_at, mask=m, other=0.0).to(tl.float32) * strength[:, None] * row
            L += tl.where(here, tl.dot(rows.to(dtype), columns, input_precision=PRECISION), 0.0)
        h = tl.where(served, 0, h // 2)
    return P, L


@triton.jit(do_not_specialize=["T"])
def scores_kernel(
    q, k, p, g, beta, P_out, L_out, reads, erases, writes, fade, cu_seqlens, row_of_chunk, first_chunk, scale, T,
    q_row, q_token: tl.constexpr, q_head, k_row, k_token: tl.constexpr, k_head, p_row, p_token: tl.constexpr, p_head,
    HQ: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BK: tl.constexpr, C: tl.constexpr, ERASE: tl.constexpr, VARLEN: tl.constexpr, LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute P [chunks, HO, C, C], L [chunks, HV, C, C] and the decayed rows; HP is the number of heads of p."""
    HO: tl.constexpr = HQ if HQ > HV else HV
    GROUP: tl.constexpr = HO // HV
    pid = tl.program_id(0)
    out = pid % HO
    c = (pid // HO).to(tl.int64)
    head = out // GROUP
    row, first, flat, valid = locate_chunk(pid // HO, cu_seqlens, row_of_chunk, first_chunk, T, C, VARLEN)
    if valid <= 0:
        return
    i = tl.arange(0, C)
    live = i < valid
    dtype: tl.constexpr = k.dtype.element_ty
    of_state = out % GROUP == 0
    both = ERASE and of_state
    state = c * HV + head
    # Scalar 64-bit bases and 32-bit offsets inside a tile: 64-bit tiles of addresses would cost registers.
    q_base = q + row * q_row + (out // (HO // HQ)).to(tl.int64) * q_head + first * q_token
    k_base = k + row * k_row + (head // (HV // H)).to(tl.int64) * k_head + first * k_token
    p_base = p + row * p_row + (head // (HV // HP)).to(tl.int64) * p_head + first * p_token
    g_base = g + (flat * HV + head) * K
    reads_base = reads + (c * HO + out) * (C * KP)
    erases_base, writes_base = erases + state * (C * KP), writes + state * (C * KP)
    strength = tl.load(beta + (flat + i) * HV + head, mask=live, other=0.0).to(tl.float32)
    P = tl.zeros([C, C], dtype=tl.float32)
    L = tl.zeros([C, C], dtype=tl.float32)
    own = tl.zeros([C], dtype=tl.float32)
    for start in range(0, KP, BK):
        d = start + tl.arange(0, BK)
        m = live[:, None] & (d < K)[None, :]
        at = i[:, None] * KP + d[None, :]
        q_at = q_base + (i[:, None] * q_token + d[None, :])
        k_at = k_base + (i[:, None] * k_token + d[None, :])
        p_at = p_base + (i[:, None] * p_token + d[None, :])
        gate = tl.load(g_base + (i[:, None] * (HV * K) + d[None, :]), mask=m, other=0.0).to(tl.float32)
        gate = tl.maximum(gate, STRONGEST)
        G, e, products = chunk_sums(gate, i, C, LIMIT)
        if of_state:
            tl.store(fade + state * KP + d, tl.exp(tl.sum(gate, axis=0)))
        if products == ONE:
            P, L = in_products(
                P, L, q_at, k_at, p_at, reads_base + at, erases_base + at, writes_base + at, m, strength, scale, gate,
                G, e, i, both, of_state, ONE, C, dtype, PRECISION,
            )  # fmt: skip
        elif products == TWO:
            P, L = in_products(
                P, L, q_at, k_at, p_at, reads_base + at, erases_base + at, writes_base + at, m, strength, scale, gate,
                G, e, i, both, of_state, TWO, C, dtype, PRECISION,
            )  # fmt: skip
        else:
            P, L = in_halves(
                P, L, q_at, k_at, p_at, reads_base + at, erases_base + at, writes_base + at, m, strength, scale, gate,
                G, i, both, of_state, C, LIMIT, dtype, PRECISION,
            )  # fmt: skip
        q_tile = tl.load(q_at, mask=m, other=0.0).to(tl.float32)
        own += scale * tl.sum(q_tile * tl.load(k_at, mask=m, other=0.0).to(tl.float32), axis=1)
    below, same = i[:, None] > i[None, :], i[:, None] == i[None, :]
    square = i[:, None] * C + i[None, :]
    P = tl.where(same, own[:, None], tl.where(below, P, 0.0))
    tl.store(P_out + (c * HO + out) * (C * C) + square, P.to(dtype))
    if both:
        tl.store(L_out + state * (C * C) + square, tl.where(below, L, 0.0))
