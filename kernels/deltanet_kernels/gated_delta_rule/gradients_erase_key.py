"""Chunked gated delta rule, backward: the gradient of the erase key, all chunks in parallel.

    dP_e = dU S^T + E K;   dG += rowsum(p_e (dU S^T)), a row earlier if the prediction is undecayed

states_backward.py has the formulas of the other gradients. The kernel runs between gradients_pairs.py, which writes E
and dG, and gradients_inputs.py, which sums dG.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.sequences import locate_chunk
from deltanet_kernels.common.tiles import load_tile, store_tile
from deltanet_kernels.gated_delta_rule.row_factors import row_after, row_factors, state_factors


@triton.jit(do_not_specialize=["T"])
def erase_key_gradients_kernel(
    k, erase_key, factors, h, dw, E, dG, d_erase_key, cu_seqlens, row_of_chunk, first_chunk, T, tokens,
    k_row, k_token: tl.constexpr, k_head,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, VARLEN: tl.constexpr, FULL: tl.constexpr,
    SOLVE: tl.constexpr, UNDECAYED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient [B, T, H, K], summed over the state heads of a key head, and add to dG [HV, B*T].

    One program per (chunk, key head). The erase key and its gradient are contiguous.
    """
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
    md = d < K
    mK = live[:, None] & md[None, :]
    square = i[:, None] * C + i[None, :]
    plane = tl.full([], HV, tl.int64) * tokens
    dtype = k.dtype.element_ty
    k_base = k + row * k_row + key_head.to(tl.int64) * k_head + first * k_token
    k_tile = load_tile(k_base + (i[:, None] * k_token + d[None, :]), mK, FULL)
    own = (flat * H + key_head) * K + (i[:, None] * (H * K) + d[None, :])
    erase_tile = load_tile(erase_key + own, mK, FULL)

    dP = tl.zeros([C, BK], dtype=tl.float32)
    for x in range(SHARE):
        head = key_head * SHARE + x
        at_row = head.to(tl.int64) * tokens + flat
        _, erase, _, _ = row_factors(state_factors(factors, plane), at_row, i, live, FULL)
        read = tl.zeros([C], dtype=tl.float32)
        for i_v in range(0, V, BV):
            e = i_v + tl.arange(0, BV)
            state_at = (c.to(tl.int64) * HV + head) * (K * V) + (e[:, None] * K + d[None, :])
            S = load_tile(h + state_at, (e < V)[:, None] & md[None, :], FULL).to(dtype)
            at = (flat * HV + head) * V + (i[:, None] * (HV * V) + e[None, :])
            dU = load_tile(dw + at, live[:, None] & (e < V)[None, :], FULL).to(tl.float32) * erase[:, None]
            dP = tl.dot(dU.to(dtype), S, dP, input_precision=PRECISION)
            read += tl.sum(dU * tl.dot(erase_tile, tl.trans(S), input_precision=PRECISION), axis=1)
        if UNDECAYED:
            read = row_after(read, i)
        dG_at = dG + at_row + i
        tl.store(dG_at, tl.load(dG_at, mask=live, other=0.0) + read, mask=live)
        if SOLVE:
            E_tile = tl.load(E + (c.to(tl.int64) * HV + head) * (C * C) + square)
            dP = tl.dot(E_tile, k_tile, dP, input_precision=PRECISION)
    store_tile(d_erase_key + own, dP, mK, FULL)
