"""Backward, all chunks in parallel: dP = tril(dO V'^T), dL = -tril(dW V'^T, -1), dV = beta dW, and rowsum(dW V).

dP and dL go through memory because gradients_inputs.py reads them transposed too.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.sequences import locate_chunk


@triton.jit(do_not_specialize=["T"])
def pair_gradients_kernel(
    v, beta, do, vn, dw, dP_out, dL_out, dv, dbeta, cu_seqlens, row_of_chunk, first_chunk, T,
    v_row, v_token: tl.constexpr, v_head, o_row, o_token: tl.constexpr, o_head,
    HO: tl.constexpr, HV: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    ERASE: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dP [chunks, HO, C, C], dL [chunks, HV, C, C], dv and rowsum(dW V); one program per (chunk, head)."""
    GROUP: tl.constexpr = HO // HV
    pid = tl.program_id(0)
    head = pid % HV
    c = pid // HV
    row, first, flat, valid = locate_chunk(c, cu_seqlens, row_of_chunk, first_chunk, T, C, VARLEN)
    if valid <= 0:
        return
    i = tl.arange(0, C)
    live = i < valid
    square = i[:, None] * C + i[None, :]
    state = c.to(tl.int64) * HV + head
    dtype: tl.constexpr = dP_out.dtype.element_ty
    strength = tl.load(beta + (flat + i) * HV + head, mask=live, other=0.0).to(tl.float32)
    v_base = v + row * v_row + head.to(tl.int64) * v_head + first * v_token
    dL = tl.zeros([C, C], dtype=tl.float32)
    db = tl.zeros([C], dtype=tl.float32)
    for start in range(0, VP, BV):
        e = start + tl.arange(0, BV)
        m = live[:, None] & (e < V)[None, :]
        dw_tile = tl.load(dw + state * (C * VP) + i[:, None] * VP + e[None, :])
        wide = dw_tile.to(tl.float32)
        v_tile = tl.load(v_base + (i[:, None] * v_token + e[None, :]), mask=m, other=0.0)
        db += tl.sum(wide * v_tile.to(tl.float32), axis=1)
        at = (flat * HV + head) * V + i[:, None] * (HV * V) + e[None, :]
        tl.store(dv + at, (strength[:, None] * wide).to(dv.dtype.element_ty), mask=m)
        if ERASE:
            n_tile = tl.load(vn + state * (C * VP) + i[:, None] * VP + e[None, :]).to(dtype)
            dL = tl.dot(dw_tile.to(dtype), tl.trans(n_tile), dL, input_precision=PRECISION)
    tl.store(dbeta + (flat + i) * HV + head, db, mask=live)
    if ERASE:
        tl.store(dL_out + state * (C * C) + square, tl.where(i[:, None] > i[None, :], -dL, 0.0).to(dtype))
    for m in range(GROUP):
        out = head * GROUP + m
        do_base = do + row * o_row + out.to(tl.int64) * o_head + first * o_token
        dP = tl.zeros([C, C], dtype=tl.float32)
        for start in range(0, VP, BV):
            e = start + tl.arange(0, BV)
            mask = live[:, None] & (e < V)[None, :]
            do_tile = tl.load(do_base + (i[:, None] * o_token + e[None, :]), mask=mask, other=0.0).to(dtype)
            n_tile = tl.load(vn + state * (C * VP) + i[:, None] * VP + e[None, :]).to(dtype)
            dP = tl.dot(do_tile, tl.trans(n_tile), dP, input_precision=PRECISION)
        dP = tl.where(i[:, None] >= i[None, :], dP, 0.0)
        tl.store(dP_out + (c.to(tl.int64) * HO + out) * (C * C) + square, dP.to(dtype))
