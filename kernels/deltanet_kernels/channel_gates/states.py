"""The sequential stage: the states between the chunks, and the values that each chunk writes.

    V' = T (beta V - erases S)  (without erasing beta V);    S <- fade S + writes^T V'

As in `gated_delta_rule/states.py`, everything is computed transposed, S^T [BV, KP], so that each product has its
computed factor on the left and a loaded one on the right.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.sequences import locate_row


@triton.jit(do_not_specialize=["T"])
def states_kernel(
    v, beta, erases, writes, Tm, fade, h0, h, vn, ht, cu_seqlens, first_chunk, T,
    v_row, v_token: tl.constexpr, v_head,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, ERASE: tl.constexpr, VARLEN: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write h [chunks, HV, VP, KP], the state entering each chunk, and vn [chunks, HV, C, VP]; ht is the last state.

    One program per (sequence, state head, slice of V).
    """
    pid = tl.program_id(0)
    NV: tl.constexpr = VP // BV
    i_v = pid % NV
    head = (pid // NV) % HV
    n = pid // (NV * HV)
    row, begin, flat, length = locate_row(n, cu_seqlens, T, VARLEN)
    chunk = tl.load(first_chunk + n).to(tl.int64) if VARLEN else row * tl.cdiv(T, C)
    i = tl.arange(0, C)
    d = tl.arange(0, KP)
    e = i_v * BV + tl.arange(0, BV)
    outer = (n.to(tl.int64) * HV + head) * K * V + d[None, :] * V + e[:, None]
    inside = (e < V)[:, None] & (d < K)[None, :]
    S = tl.zeros([BV, KP], dtype=tl.float32)
    if INITIAL:
        S += tl.load(h0 + outer, mask=inside, other=0.0).to(tl.float32)
    v_base = v + row * v_row + head.to(tl.int64) * v_head + begin * v_token
    v_at = i[None, :] * v_token + e[:, None]
    rows_at = i[:, None] * KP + d[None, :]
    square = i[:, None] * C + i[None, :]
    dtype: tl.constexpr = writes.dtype.element_ty
    # V I = V exactly: as an operand of a product V comes through shared memory like the rest, which is faster.
    unit = tl.where(i[:, None] == i[None, :], 1.0, 0.0).to(dtype)
    count = tl.cdiv(length, C)
    for t in tl.range(0, count, num_stages=STAGES):
        at = (chunk + t) * HV + head
        live = i < length - t * C
        token = begin * 0 + t * C  # 64 bits
        w_tile = tl.load(writes + at * (C * KP) + rows_at)
        v_tile = tl.load(v_base + token * v_token + v_at, mask=live[None, :] & (e < V)[:, None], other=0.0)
        strength = tl.load(beta + (flat + token + i) * HV + head, mask=live, other=0.0).to(tl.float32)
        S_cast = S.to(dtype)
        tl.store(h + at * (VP * KP) + e[:, None] * KP + d[None, :], S_cast.to(h.dtype.element_ty))
        if dtype == tl.float32:  # noqa: SIM108 (the other branch is not compiled)
            W = strength[None, :] * v_tile
        else:
            W = strength[None, :] * tl.dot(v_tile.to(dtype), unit)
        if ERASE:
            e_tile = tl.load(erases + at * (C * KP) + rows_at)
            T_tile = tl.load(Tm + at * (C * C) + square)
            W -= tl.dot(S_cast, tl.trans(e_tile), input_precision=PRECISION)
            W = tl.dot(W.to(dtype), tl.trans(T_tile), input_precision=PRECISION)
        tl.store(vn + at * (C * VP) + i[None, :] * VP + e[:, None], W.to(vn.dtype.element_ty))
        S *= tl.load(fade + at * KP + d)[None, :]
        S = tl.dot(W.to(dtype), w_tile, S, input_precision=PRECISION)
    if FINAL:
        tl.store(ht + outer, S, mask=inside)
