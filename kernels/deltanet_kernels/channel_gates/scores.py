"""First stage of the chunks: scores P and L, and the decayed rows that the later stages multiply.

One program per (chunk, output head) computes P and reads; the first head of each state also computes L, erases, writes
and fade. All tiles are stored as [chunks, heads, C, KP] with zeros past the end of a sequence and past K, so that the
later stages load complete tiles.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.channel_gates.decay import STRONGEST, chunk_sums, pair_products, since_start, until_end
from deltanet_kernels.common.sequences import locate_chunk


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
    # Scalar 64-bit bases and 32-bit offsets inside a tile: 64-bit tiles of addresses would cost registers.
    q_base = q + row * q_row + (out // (HO // HQ)).to(tl.int64) * q_head + first * q_token
    k_base = k + row * k_row + (head // (HV // H)).to(tl.int64) * k_head + first * k_token
    p_base = p + row * p_row + (head // (HV // HP)).to(tl.int64) * p_head + first * p_token
    g_base = g + (flat * HV + head) * K
    reads_base = reads + (c * HO + out) * (C * KP)
    square = i[:, None] * C + i[None, :]
    M = tl.zeros([C, C], dtype=tl.float32)
    own = tl.zeros([C], dtype=tl.float32)
    for start in range(0, KP, BK):
        d = start + tl.arange(0, BK)
        m = live[:, None] & (d < K)[None, :]
        gate = tl.load(g_base + (i[:, None] * (HV * K) + d[None, :]), mask=m, other=0.0).to(tl.float32)
        gate = tl.maximum(gate, STRONGEST)
        G, e_pairs, mild = chunk_sums(gate, i, C, LIMIT)
        q_tile = tl.load(q_base + (i[:, None] * q_token + d[None, :]), mask=m, other=0.0).to(tl.float32) * scale
        k_tile = tl.load(k_base + (i[:, None] * k_token + d[None, :]), mask=m, other=0.0).to(tl.float32)
        own += tl.sum(q_tile * k_tile, axis=1)
        M += pair_products(q_tile, k_tile, gate, e_pairs, mild, i, C, LIMIT, dtype, PRECISION)
        since = since_start(gate, G, mild, i, dtype, PRECISION)
        tl.store(reads_base + (i[:, None] * KP + d[None, :]), (q_tile * since).to(dtype))
    M += tl.where(i[:, None] == i[None, :], own[:, None], 0.0)
    tl.store(P_out + (c * HO + out) * (C * C) + square, M.to(dtype))
    if out % GROUP != 0:
        return
    state = c * HV + head
    strength = tl.load(beta + (flat + i) * HV + head, mask=live, other=0.0).to(tl.float32)
    M = tl.zeros([C, C], dtype=tl.float32)
    for start in range(0, KP, BK):
        d = start + tl.arange(0, BK)
        m = live[:, None] & (d < K)[None, :]
        at = i[:, None] * KP + d[None, :]
        gate = tl.load(g_base + (i[:, None] * (HV * K) + d[None, :]), mask=m, other=0.0).to(tl.float32)
        gate = tl.maximum(gate, STRONGEST)
        G, e_pairs, mild = chunk_sums(gate, i, C, LIMIT)
        k_tile = tl.load(k_base + (i[:, None] * k_token + d[None, :]), mask=m, other=0.0).to(tl.float32)
        if ERASE:
            p_tile = tl.load(p_base + (i[:, None] * p_token + d[None, :]), mask=m, other=0.0).to(tl.float32)
            p_tile *= strength[:, None]
            M += pair_products(p_tile, k_tile, gate, e_pairs, mild, i, C, LIMIT, dtype, PRECISION)
            since = since_start(gate, G, mild, i, dtype, PRECISION)
            tl.store(erases + state * (C * KP) + at, (p_tile * since).to(dtype))
        until = until_end(gate, G, mild, i, dtype, PRECISION)
        tl.store(writes + state * (C * KP) + at, (k_tile * until).to(dtype))
        tl.store(fade + state * KP + d, tl.exp(tl.sum(gate, axis=0)))
    if ERASE:
        tl.store(L_out + state * (C * C) + square, M)
