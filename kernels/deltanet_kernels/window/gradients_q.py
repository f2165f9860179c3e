"""The gradient of q, delta, and each query tile's part of the gradients of the sinks.

    delta_i = <do_i, o_i> - dlse_i;  ds_ij = p_ij (<do_i, v_j> - delta_i), times the slope of the cap
    dq_i = scale sum_j ds_ij k_j
    parts, over the queries i of the tile and sink pairs only:  dk_j = scale sum_i ds_ij q_i;  dv_j = sum_i p_ij do_i

All later queries see a sink; their sums are therefore taken in two steps, of which this is the first.

With `seen_k` and `seen_v` [B, packed, HK, D], queries see the tokens before their own group of GROUP in this form, as
in `deltanet_kernels.prompt_attention`; sinks are the same in both.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.online_softmax import HIDDEN, LOG2E
from deltanet_kernels.window.softcap import tanh
from deltanet_kernels.window.tiles import in_sinks, in_window, is_partly_seen, load_rows, locate_tile, store_rows


@triton.jit
def _add(
    dq, q_MD, do_MD, k_ND, v_ND, seen, top, delta, factor, CAP: tl.constexpr, PRECISION: tl.constexpr, partly=True
):
    """dq / scale with the keys of one tile, of which the queries see `seen` or, unless `partly`, all."""
    s = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * factor
    if CAP is not None:
        u = tanh(s)
        s = u * (CAP * LOG2E)
    s = s - top[:, None]
    if partly:
        s = tl.where(seen, s, HIDDEN)
    dp = tl.dot(do_MD, tl.trans(v_ND), input_precision=PRECISION)
    ds = tl.exp2(s) * (dp - delta[:, None])
    if CAP is not None:
        ds *= 1.0 - u * u
    return tl.dot(ds.to(k_ND.dtype), k_ND, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T", "window", "packed"])
def gradients_q_kernel(
    q, k, v, o, do, lse, dlse, dq, delta, parts, cu_seqlens, row_of_chunk, first_chunk, seen_k, seen_v, T, packed,
    window, scale,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head, do_row, do_token, do_head,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """One program per chunk of TILE.M queries and query head; parts is [chunks, 2, HQ, SINKS, D], dk before dv."""
    BM: tl.constexpr = TILE.M
    BN: tl.constexpr = TILE.N
    BS: tl.constexpr = TILE.S
    BD: tl.constexpr = TILE.D
    VARLEN: tl.constexpr = cu_seqlens is not None
    h = tl.program_id(0) % HQ
    c = tl.program_id(0) // HQ
    row, begin, flat, length, position, valid = locate_tile(c, cu_seqlens, row_of_chunk, first_chunk, T, BM, VARLEN)
    if valid <= 0:
        return
    q += row * q_row + begin * q_token + h.to(tl.int64) * q_head
    k += row * k_row + begin * k_token + (h // (HQ // HK)).to(tl.int64) * k_head
    v += row * v_row + begin * v_token + (h // (HQ // HK)).to(tl.int64) * v_head
    do += row * do_row + begin * do_token + h.to(tl.int64) * do_head
    d = tl.arange(0, BD)
    i = position + tl.arange(0, BM)
    m_i = i < length
    q_MD = load_rows(q, i, q_token, length, d, D)
    do_MD = load_rows(do, i, do_token, length, d, D)
    o_MD = load_rows(o + (flat * HQ + h) * D, i, HQ * D, length, d, D)
    at = (flat + i) * HQ + h
    delta_M = tl.sum(do_MD.to(tl.float32) * o_MD.to(tl.float32), axis=1)
    if dlse is not None:
        delta_M -= tl.load(dlse + at, mask=m_i, other=0.0)
    tl.store(delta + at, delta_M, mask=m_i)
    top = tl.load(lse + at, mask=m_i, other=0.0) * LOG2E
    factor = scale * LOG2E if CAP is None else scale / CAP
    dq_MD = tl.zeros([BM, BD], dtype=tl.float32)
    for start in range(0, tl.minimum(SINKS, position + valid - window), BS):
        j = start + tl.arange(0, BS)
        k_SD = load_rows(k, j, k_token, length, d, D)
        v_SD = load_rows(v, j, v_token, length, d, D)
        seen = in_sinks(i[:, None], j[None, :], window, SINKS, EDGE)
        dq_MD = _add(dq_MD, q_MD, do_MD, k_SD, v_SD, seen, top, delta_M, factor, CAP, PRECISION)
        # Computed again as columns, because Triton miscompiled products with a transposed accumulator on Hopper.
        s = tl.dot(k_SD, tl.trans(q_MD), input_precision=PRECISION) * factor
        if CAP is not None:
            u = tanh(s)
            s = u * (CAP * LOG2E)
        s = s - top[None, :]
        dp = tl.dot(v_SD, tl.trans(do_MD), input_precision=PRECISION)
        seen = in_sinks(i[None, :], j[:, None], window, SINKS, EDGE) & m_i[None, :]
        p = tl.exp2(tl.where(seen, s, HIDDEN))
        ds = p * (dp - delta_M[None, :])
        if CAP is not None:
            ds *= 1.0 - u * u
        dk = tl.dot(ds.to(q_MD.dtype), q_MD, input_precision=PRECISION)
        dv = tl.dot(p.to(do_MD.dtype), do_MD, input_precision=PRECISION)
        part = parts + (c.to(tl.int64) * 2 * HQ + h) * (SINKS * D)
        store_rows(part, j, D, SINKS, d, D, dk * scale)
        store_rows(part + HQ * SINKS * D, j, D, SINKS, d, D, dv)
    # Rows of zeros stand for the queries behind the last; what is added to them is not stored.
    first = tl.maximum(position // EDGE * EDGE - window + 1, 0)
    if seen_k is not None:
        own = position // GROUP * GROUP
        at = (row * packed * HK + h // (HQ // HK)) * D
        for start in tl.range(first, (position + valid - 1) // GROUP * GROUP, BN, num_stages=TILE.stages):
            j = start + tl.arange(0, BN)
            k_ND = load_rows(seen_k + at, j, HK * D, packed, d, D)
            v_ND = load_rows(seen_v + at, j, HK * D, packed, d, D)
            seen = in_window(i[:, None], j[None, :], window, EDGE) & ((i // GROUP)[:, None] != j // GROUP)
            partly = is_partly_seen(start, position, own, window, BM, BN)
            dq_MD = _add(dq_MD, q_MD, do_MD, k_ND, v_ND, seen, top, delta_M, factor, CAP, PRECISION, partly)
        first = own
    for start in tl.range(first, position + valid, BN, num_stages=TILE.stages):
        j = start + tl.arange(0, BN)
        k_ND = load_rows(k, j, k_token, length, d, D)
        v_ND = load_rows(v, j, v_token, length, d, D)
        seen = in_window(i[:, None], j[None, :], window, EDGE)
        partly = is_partly_seen(start, position, position + 1, window, BM, BN)
        if seen_k is not None:
            seen, partly = seen & ((i // GROUP)[:, None] == j // GROUP), True
        dq_MD = _add(dq_MD, q_MD, do_MD, k_ND, v_ND, seen, top, delta_M, factor, CAP, PRECISION, partly)
    store_rows(dq + (flat * HQ + h) * D, i, HQ * D, length, d, D, dq_MD * scale)
