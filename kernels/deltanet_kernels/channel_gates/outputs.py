"""The outputs, all chunks in parallel: O = reads S + P V'."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.sequences import locate_chunk


@triton.jit(do_not_specialize=["T"])
def outputs_kernel(
    reads, P, h, vn, o, cu_seqlens, row_of_chunk, first_chunk, T,
    HO: tl.constexpr, HV: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write o [B, T, HO, V]; one program per (chunk, output head, slice of V)."""
    NV: tl.constexpr = VP // BV
    pid = tl.program_id(0)
    i_v = pid % NV
    out = (pid // NV) % HO
    c = pid // (NV * HO)
    _, _, flat, valid = locate_chunk(c, cu_seqlens, row_of_chunk, first_chunk, T, C, VARLEN)
    if valid <= 0:
        return
    i = tl.arange(0, C)
    d = tl.arange(0, KP)
    e = i_v * BV + tl.arange(0, BV)
    dtype: tl.constexpr = reads.dtype.element_ty
    state = c.to(tl.int64) * HV + out // (HO // HV)
    own = c.to(tl.int64) * HO + out
    r_tile = tl.load(reads + own * (C * KP) + i[:, None] * KP + d[None, :])
    S = tl.load(h + state * (VP * KP) + e[:, None] * KP + d[None, :]).to(dtype)
    out_tile = tl.dot(r_tile, tl.trans(S), input_precision=PRECISION)
    P_tile = tl.load(P + own * (C * C) + i[:, None] * C + i[None, :])
    v_tile = tl.load(vn + state * (C * VP) + i[:, None] * VP + e[None, :]).to(dtype)
    out_tile = tl.dot(P_tile, v_tile, out_tile, input_precision=PRECISION)
    at = (flat * HO + out) * V + i[:, None] * (HO * V) + e[None, :]
    tl.store(o + at, out_tile.to(o.dtype.element_ty), mask=(i < valid)[:, None] & (e < V)[None, :])
