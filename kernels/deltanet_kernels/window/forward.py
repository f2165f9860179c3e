"""Attention over window and sinks, forward: an online softmax over the tiles of keys that a tile of queries sees.

m' = max(m, max_j s_ij);  l' = l e^{m - m'} + sum_j e^{s_ij - m'};  a' = a e^{m - m'} + sum_j e^{s_ij - m'} v_j
o = a / l;  lse = m + log l
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.online_softmax import HIDDEN, LOG2E
from deltanet_kernels.window.softcap import cap_score
from deltanet_kernels.window.tiles import in_sinks, in_window, is_partly_seen, load_rows, locate_tile, store_rows


@triton.jit
def attend_tile(
    q_MD, k, v, j, seen, top, total, sums, k_token, v_token, length, d, factor, D: tl.constexpr,
    CAP: tl.constexpr, PRECISION: tl.constexpr, partly=True,
):  # fmt: skip
    """The maximum m, sum l and weighted values a of each query after keys j, of which it sees `seen` or, unless
    `partly`, all."""
    k_ND = load_rows(k, j, k_token, length, d, D)
    s = cap_score(tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * factor, CAP)
    if partly:
        s = tl.where(seen, s, HIDDEN)
    higher = tl.maximum(top, tl.max(s, axis=1))
    # If all keys so far are hidden, p is 1; the first key in sight multiplies these sums by 0.
    p = tl.exp2(s - higher[:, None])
    fade = tl.exp2(top - higher)
    total = total * fade + tl.sum(p, axis=1)
    v_ND = load_rows(v, j, v_token, length, d, D)
    sums = tl.dot(p.to(v_ND.dtype), v_ND, sums * fade[:, None], input_precision=PRECISION)
    return higher, total, sums


@triton.jit(do_not_specialize=["T", "window"])
def forward_kernel(
    q, k, v, o, lse, cu_seqlens, row_of_chunk, first_chunk, T, window, scale,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BS: tl.constexpr, BD: tl.constexpr, VARLEN: tl.constexpr, STAGES: tl.constexpr, CAP: tl.constexpr,
    PRECISION: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """One program per chunk of BM queries and query head."""
    h = tl.program_id(0) % HQ
    c = tl.program_id(0) // HQ
    row, begin, flat, length, position, valid = locate_tile(c, cu_seqlens, row_of_chunk, first_chunk, T, BM, VARLEN)
    if valid <= 0:
        return
    q += row * q_row + begin * q_token + h.to(tl.int64) * q_head
    k += row * k_row + begin * k_token + (h // (HQ // HK)).to(tl.int64) * k_head
    v += row * v_row + begin * v_token + (h // (HQ // HK)).to(tl.int64) * v_head
    d = tl.arange(0, BD)
    i = position + tl.arange(0, BM)
    q_MD = load_rows(q, i, q_token, length, d, D)
    factor = scale * LOG2E if CAP is None else scale / CAP
    top = tl.full([BM], HIDDEN, dtype=tl.float32)
    total = tl.zeros([BM], dtype=tl.float32)
    sums = tl.zeros([BM, BD], dtype=tl.float32)
    for start in range(0, tl.minimum(SINKS, position + valid - window), BS):
        j = start + tl.arange(0, BS)
        seen = in_sinks(i[:, None], j[None, :], window, SINKS, EDGE)
        top, total, sums = attend_tile(
            q_MD, k, v, j, seen, top, total, sums, k_token, v_token, length, d, factor, D, CAP, PRECISION
        )
    for start in tl.range(tl.maximum(position // EDGE * EDGE - window + 1, 0), position + valid, BN, num_stages=STAGES):
        j = start + tl.arange(0, BN)
        seen = in_window(i[:, None], j[None, :], window, EDGE)
        partly = is_partly_seen(start, position, position + 1, window, BM, BN)
        top, total, sums = attend_tile(
            q_MD, k, v, j, seen, top, total, sums, k_token, v_token, length, d, factor, D, CAP, PRECISION, partly
        )
    out = o + (flat * HQ + h) * D
    store_rows(out, i, HQ * D, length, d, D, sums / total[:, None])
    tl.store(lse + (flat + i) * HQ + h, top / LOG2E + tl.log(total), mask=i < length)
