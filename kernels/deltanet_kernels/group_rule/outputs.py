"""The rule read at boundaries: the outputs where several query heads share a state, all chunks in parallel.

From the states S that enter the chunks and V'; states.py has the formulas.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.sequences import locate_chunk
from deltanet_kernels.common.tiles import load_tile
from deltanet_kernels.gated_delta_rule.row_factors import middle_decays, output_factors, row_factors, state_factors
from deltanet_kernels.group_rule.read import read_state


@triton.jit(do_not_specialize=["T"])
def group_outputs_kernel(
    q, k, factors, h, vn, o, cu_seqlens, row_of_chunk, first_chunk, scale, T, tokens, q_row, q_token: tl.constexpr,
    q_head, k_row, k_token: tl.constexpr, k_head, H: tl.constexpr, HV: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, VARLEN: tl.constexpr, FULL: tl.constexpr,
    NORM: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per (chunk, state head, slice of V)."""
    READERS: tl.constexpr = HQ // HV
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = pid % NV
    head = (pid // NV) % HV
    c = pid // (NV * HV)
    row, first, flat, valid = locate_chunk(c, cu_seqlens, row_of_chunk, first_chunk, T, C, VARLEN)
    if VARLEN:  # noqa: SIM102 (known when compiling; the next is not)
        if valid <= 0:
            return
    i = tl.arange(0, 32)
    d = tl.arange(0, BK)
    e = i_v * BV + tl.arange(0, BV)
    live = i < valid
    late = i + 32 < valid
    md = d < K
    me = e < V
    dtype = k.dtype.element_ty
    plane = tl.full([], HV, tl.int64) * tokens
    at_row = head.to(tl.int64) * tokens + flat
    S_at = h + (c.to(tl.int64) * HV + head) * (K * V) + (e[:, None] * K + d[None, :])
    S = load_tile(S_at, me[:, None] & md[None, :], FULL)
    if C == 64:
        k_base = k + row * k_row + (head // (HV // H)).to(tl.int64) * k_head + first * k_token
        k_tile = load_tile(k_base + (i[:, None] * k_token + d[None, :]), live[:, None] & md[None, :], FULL)
        vn_at = vn + (flat * HV + head) * V + (i[None, :] * (HV * V) + e[:, None])
        written = load_tile(vn_at, me[:, None] & live[None, :], FULL).to(tl.float32)
        _, _, _, r = row_factors(state_factors(factors, plane), at_row, i, live, FULL)
        until, fade, _ = middle_decays(factors + at_row, plane, i, valid, FULL)
        written = (written * (until * r)[None, :]).to(dtype)
        S_middle = tl.dot(written, k_tile, S.to(tl.float32) * fade, input_precision=PRECISION).to(dtype)
    S = S.to(dtype)
    for m in range(READERS):
        out = (head * READERS + m).to(tl.int64)
        q_at = q + row * q_row + out * q_head + first * q_token + (i[:, None] * q_token + d[None, :])
        o_at = o + (flat * HQ + out) * V + (i[None, :] * (HQ * V) + e[:, None])
        reads = output_factors(factors, plane) + 4 * (out * tokens + flat)
        read_state(S, q_at, o_at, reads, 1.0, scale, i, i_v, live, md, me, FULL, NORM, KEEP, PRECISION)
        if C == 64:
            read_state(
                S_middle, q_at + 32 * q_token, o_at + 32 * HQ * V, reads + 4 * 32, fade, scale, i, i_v, late,
                md, me, FULL, NORM, KEEP, PRECISION,
            )  # fmt: skip
