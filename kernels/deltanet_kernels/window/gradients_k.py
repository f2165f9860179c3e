"""The gradients of k and v: the sum of the sinks' parts, then one sum per tile of keys over the queries that see it.

dk_j = scale sum_i ds_ij q_i;  dv_j = sum_i p_ij do_i        over the window pairs; sink pairs come from the parts

Where queries see earlier groups in another form (`gradients_q.py`), its gradients are added to those of k and v.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.online_softmax import HIDDEN, LOG2E
from deltanet_kernels.common.sequences import locate_row
from deltanet_kernels.window.softcap import tanh
from deltanet_kernels.window.tiles import in_window, load_rows, locate_tile, store_rows


@triton.jit(do_not_specialize=["T", "window"])
def sink_sums_kernel(
    parts, sums, cu_seqlens, first_chunk, T, window,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
    ROWS: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Program (n, x, h, s) adds the parts of sink s and key head h over the chunks of BM queries of sequence n and the
    group's query heads, always in the same order; x is 0 for dk and 1 for dv. sums is [N, 2, HK, SINKS, D]."""
    GROUP: tl.constexpr = HQ // HK
    p = tl.program_id(0)
    s = p % SINKS
    h = p // SINKS % HK
    x = p // (SINKS * HK) % 2
    n = p // (SINKS * HK * 2)
    _, _, _, length = locate_row(n, cu_seqlens, T, VARLEN)
    first = tl.load(first_chunk + n).to(tl.int64) if VARLEN else n.to(tl.int64) * tl.cdiv(T, BM)
    d = tl.arange(0, BD)
    r = tl.arange(0, ROWS)
    total = tl.zeros([BD], dtype=tl.float32)
    # The last query of a chunk that has a part is `window` or more behind the sink.
    begin = (s + window) // BM * GROUP
    for start in range(begin, tl.cdiv(length, BM) * GROUP, ROWS):
        c = (start + r) // GROUP
        m = (tl.minimum((c + 1) * BM, length) > s + window) & (c * BM < length)
        at = (((first + c) * 2 + x) * HQ + h * GROUP + (start + r) % GROUP) * SINKS + s
        total += tl.sum(tl.load(parts + at[:, None] * D + d[None, :], mask=m[:, None] & (d < D)[None, :], other=0.0), 0)
    tl.store(sums + p.to(tl.int64) * D + d, total, mask=d < D)


@triton.jit
def _add(
    dk_ND, dv_ND, k_ND, v_ND, q, do, lse, delta, j, begin, inner, outer, end, length, window, d, factor,
    q_token, q_head, do_token, do_head,
    HQ: tl.constexpr, GROUP: tl.constexpr, OWN: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr,
    PRECISION: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """dk / scale and dv with the queries from `begin` to `end` of TILE.heads heads, of which those from `inner` to
    `outer` see all of the keys.

    Where OWN is not None, only with those in the same (True) or in another (False) group of GROUP tokens. Rows of zeros
    stand for the queries behind the last, which add nothing.
    """
    for member in range(TILE.heads):
        q_at = q + member * q_head
        do_at = do + member * do_head
        for start in tl.range(begin, end, TILE.M, num_stages=TILE.stages):
            i = start + tl.arange(0, TILE.M)
            q_MD = load_rows(q_at, i, q_token, length, d, D)
            do_MD = load_rows(do_at, i, do_token, length, d, D)
            at = i.to(tl.int64) * HQ + member
            top = tl.load(lse + at, mask=i < length, other=0.0) * LOG2E
            delta_M = tl.load(delta + at, mask=i < length, other=0.0)
            s = tl.dot(k_ND, tl.trans(q_MD), input_precision=PRECISION) * factor
            if CAP is not None:
                u = tanh(s)
                s = u * (CAP * LOG2E)
            s = s - top[None, :]
            dp = tl.dot(v_ND, tl.trans(do_MD), input_precision=PRECISION)
            if (start < inner) | (start + TILE.M > outer):
                seen = in_window(i[None, :], j[:, None], window, EDGE)
                if OWN is not None:
                    seen = seen & (((i // GROUP)[None, :] == (j // GROUP)[:, None]) == OWN)
                s = tl.where(seen, s, HIDDEN)
            p = tl.exp2(s)
            dv_ND = tl.dot(p.to(do_MD.dtype), do_MD, dv_ND, input_precision=PRECISION)
            ds = p * (dp - delta_M[None, :])
            if CAP is not None:
                ds *= 1.0 - u * u
            dk_ND = tl.dot(ds.to(q_MD.dtype), q_MD, dk_ND, input_precision=PRECISION)
    return dk_ND, dv_ND


@triton.jit(do_not_specialize=["T", "window", "packed", "part"])
def gradients_k_kernel(
    q, k, v, do, lse, delta, sums, dk, dv, cu_seqlens, row_of_chunk, first_chunk, seen_k, seen_v, T, packed, window,
    scale, part,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head, do_row, do_token, do_head,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """One program per chunk of TILE.N keys, key head and TILE.heads query heads; it reads TILE.M queries at a time.

    Sums over different query heads are `part` numbers apart in dk and dv.
    """
    BN: tl.constexpr = TILE.N
    BD: tl.constexpr = TILE.D
    HEADS: tl.constexpr = TILE.heads
    VARLEN: tl.constexpr = cu_seqlens is not None
    PARTS: tl.constexpr = HQ // HK // HEADS
    x = tl.program_id(0) % PARTS
    h = tl.program_id(0) // PARTS % HK
    c = tl.program_id(0) // (PARTS * HK)
    row, begin, flat, length, position, valid = locate_tile(c, cu_seqlens, row_of_chunk, first_chunk, T, BN, VARLEN)
    if valid <= 0:
        return
    d = tl.arange(0, BD)
    j = position + tl.arange(0, BN)
    first = (h * PARTS + x) * HEADS
    q += row * q_row + begin * q_token + first.to(tl.int64) * q_head
    do += row * do_row + begin * do_token + first.to(tl.int64) * do_head
    lse += flat * HQ + first
    delta += flat * HQ + first
    factor = scale * LOG2E if CAP is None else scale / CAP
    dk_ND = tl.zeros([BN, BD], dtype=tl.float32)
    dv_ND = tl.zeros([BN, BD], dtype=tl.float32)
    inner, outer = position + BN, position + window
    end = tl.minimum((outer + valid - 2 + EDGE) // EDGE * EDGE, length)
    OWN: tl.constexpr = None if seen_k is None else True
    if seen_k is not None:
        far = (row * packed * HK + h) * D
        k_ND = load_rows(seen_k + far, j, HK * D, packed, d, D)
        v_ND = load_rows(seen_v + far, j, HK * D, packed, d, D)
        dk_ND, dv_ND = _add(
            dk_ND, dv_ND, k_ND, v_ND, q, do, lse, delta, j, position, inner, outer, end, length, window, d, factor,
            q_token, q_head, do_token, do_head, HQ, GROUP, False, D, TILE, CAP, PRECISION, EDGE,
        )  # fmt: skip
        end = tl.minimum((position + valid + GROUP - 1) // GROUP * GROUP, end)
        outer = inner
    k_ND = load_rows(k + row * k_row + begin * k_token + h.to(tl.int64) * k_head, j, k_token, length, d, D)
    v_ND = load_rows(v + row * v_row + begin * v_token + h.to(tl.int64) * v_head, j, v_token, length, d, D)
    dk_ND, dv_ND = _add(
        dk_ND, dv_ND, k_ND, v_ND, q, do, lse, delta, j, position, inner, outer, end, length, window, d, factor,
        q_token, q_head, do_token, do_head, HQ, GROUP, OWN, D, TILE, CAP, PRECISION, EDGE,
    )  # fmt: skip
    dk_ND *= scale
    if (position < SINKS) & (x == 0):
        n = tl.load(row_of_chunk + c).to(tl.int64) if VARLEN else row
        sink = sums + (n * 2 * HK + h) * (SINKS * D)
        dk_ND += load_rows(sink, j, D, SINKS, d, D)
        dv_ND += load_rows(sink + HK * SINKS * D, j, D, SINKS, d, D)
    at = x.to(tl.int64) * part + (flat * HK + h) * D
    store_rows(dk + at, j, HK * D, length, d, D, dk_ND)
    store_rows(dv + at, j, HK * D, length, d, D, dv_ND)
