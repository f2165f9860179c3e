"""Backward, sequential: the gradients of the states, chunks in reverse order.

With dS the gradient of the state that leaves the chunk, and the transposed system of (I + L) V' = W,

    dV' = writes dS + P^T dO;    dW = T^T dV'  (without erasing dV');    dS <- fade dS + reads^T dO - erases^T dW

gradients_pairs.py and gradients_inputs.py have what follows, all chunks in parallel. Transposed as in states.py.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.sequences import locate_row


@triton.jit(do_not_specialize=["T"])
def states_backward_kernel(
    do, reads, erases, writes, Tm, P, fade, dht, dh, dw, dh0, cu_seqlens, first_chunk, T,
    o_row, o_token: tl.constexpr, o_head,
    HO: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, ERASE: tl.constexpr, VARLEN: tl.constexpr, INITIAL: tl.constexpr,
    FINAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write dh [chunks, HV, VP, KP], the gradient of the state leaving each chunk, and dw [chunks, HV, C, VP].

    One program per (sequence, state head, slice of V).
    """
    GROUP: tl.constexpr = HO // HV
    NV: tl.constexpr = VP // BV
    pid = tl.program_id(0)
    i_v = pid % NV
    head = (pid // NV) % HV
    n = pid // (NV * HV)
    row, begin, _, length = locate_row(n, cu_seqlens, T, VARLEN)
    chunk = tl.load(first_chunk + n).to(tl.int64) if VARLEN else row * tl.cdiv(T, C)
    i = tl.arange(0, C)
    d = tl.arange(0, KP)
    e = i_v * BV + tl.arange(0, BV)
    outer = (n.to(tl.int64) * HV + head) * K * V + d[None, :] * V + e[:, None]
    inside = (e < V)[:, None] & (d < K)[None, :]
    dS = tl.zeros([BV, KP], dtype=tl.float32)
    if FINAL:
        dS += tl.load(dht + outer, mask=inside, other=0.0).to(tl.float32)
    do_base = do + row * o_row + begin * o_token
    do_at = i[None, :] * o_token + e[:, None]
    rows_at = i[:, None] * KP + d[None, :]
    square = i[:, None] * C + i[None, :]
    dtype: tl.constexpr = writes.dtype.element_ty
    count = tl.cdiv(length, C)
    for step in tl.range(0, count, num_stages=STAGES):
        t = count - 1 - step
        at = (chunk + t) * HV + head
        token = begin * 0 + t * C  # 64 bits
        mask = (i < length - t * C)[None, :] & (e < V)[:, None]
        w_tile = tl.load(writes + at * (C * KP) + rows_at)
        dS_cast = dS.to(dtype)
        tl.store(dh + at * (VP * KP) + e[:, None] * KP + d[None, :], dS_cast.to(dh.dtype.element_ty))
        dV = tl.dot(dS_cast, tl.trans(w_tile), input_precision=PRECISION)
        dS *= tl.load(fade + at * KP + d)[None, :]
        for m in tl.static_range(GROUP):
            out = head * GROUP + m
            own = (chunk + t) * HO + out
            do_tile = tl.load(do_base + out.to(tl.int64) * o_head + token * o_token + do_at, mask=mask, other=0.0)
            do_tile = do_tile.to(dtype)
            P_tile = tl.load(P + own * (C * C) + square)
            r_tile = tl.load(reads + own * (C * KP) + rows_at)
            dV = tl.dot(do_tile, P_tile, dV, input_precision=PRECISION)
            dS = tl.dot(do_tile, r_tile, dS, input_precision=PRECISION)
        if ERASE:
            T_tile = tl.load(Tm + at * (C * C) + square)
            e_tile = tl.load(erases + at * (C * KP) + rows_at)
            dV = tl.dot(dV.to(dtype), T_tile, input_precision=PRECISION)
            dS = tl.dot((-dV).to(dtype), e_tile, dS, input_precision=PRECISION)
        tl.store(dw + at * (C * VP) + i[None, :] * VP + e[:, None], dV.to(dw.dtype.element_ty))
    if INITIAL:
        tl.store(dh0 + outer, dS, mask=inside)
