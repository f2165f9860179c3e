"""The kernel of the attention of one query per sequence to a span of places; `combine_kernel` adds the spans.

Scores are in units of log 2. A span c leaves their maximum m_c, the sum t_c of p = 2^{s - m_c} and the sum a_c of p v;
one in which nothing is seen leaves -inf, 0 and 0. The maximum stays apart from the sum: where scores are large, the
log-sum-exp m + log t would round to m.

A program reads the mask of its span first and begins and ends at the places that are seen. So the empty places behind
the tokens of a growing cache cost nothing, and the maximum is finite from the first tile on. A 16-bit p is multiplied
in two parts, as the product has room for it while it waits for memory: then only the output is rounded.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.online_softmax import LOG2E, add_tile


@triton.jit
def _seen_range(mask, begin, end, BLOCK: tl.constexpr):
    """The first seen place from `begin` to before `end`, and the one after the last; `end` and `begin` if none is."""
    n = tl.arange(0, BLOCK)
    low = tl.full([BLOCK], 0, tl.int32) + end
    high = tl.full([BLOCK], 0, tl.int32) + begin
    for start in range(begin, end, BLOCK):
        j = start + n
        seen = tl.load(mask + j, mask=j < end, other=0) != 0
        low = tl.minimum(low, tl.where(seen, j, end))
        high = tl.maximum(high, tl.where(seen, j + 1, begin))
    return tl.min(low, axis=0), tl.max(high, axis=0)


@triton.jit(do_not_specialize=["spans"])
def span_kernel(
    q, k, v, mask, o, weights, scale, S, span, spans, q_row, q_head, k_row, k_head, k_place, v_row, v_head, v_place,
    HK: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per row, key head and span of places, for the GROUP query heads of the key head.

    SPLIT: a [B, HQ, spans, D] goes to o, m and t to weights [B, HQ, spans, 2], all float32; otherwise o is [B, HQ, D].
    """
    c = tl.program_id(0) % spans
    pair = (tl.program_id(0) // spans).to(tl.int64)
    b, h = pair // HK, pair % HK
    mask += b * S
    low, high = _seen_range(mask, c * span, tl.minimum(c * span + span, S), BLOCK)
    g, n, d = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD)
    m_q = (g < GROUP)[:, None] & (d < D)[None, :]
    q_MD = tl.load(q + b * q_row + (h * GROUP + g)[:, None] * q_head + d[None, :], mask=m_q, other=0.0)
    mask += low
    k += b * k_row + h * k_head + low.to(tl.int64) * k_place
    v += b * v_row + h * v_head + low.to(tl.int64) * v_place
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    sums = tl.zeros([BM, BD], tl.float32)
    for start in tl.range(0, high - low, BN, num_stages=STAGES):
        j = start + n
        at = j.to(tl.int64)[:, None]
        m = (j < high - low)[:, None] & (d < D)[None, :]
        k_ND = tl.load(k + at * k_place + d[None, :], mask=m, other=0.0)
        v_ND = tl.load(v + at * v_place + d[None, :], mask=m, other=0.0)
        seen = tl.load(mask + j, mask=j < high - low, other=0) != 0
        s = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * (scale * LOG2E)
        s = tl.where(seen[None, :], s, float("-inf"))
        top, total, sums = add_tile(s, v_ND, top, total, sums, EXACT, PRECISION)
    at_q = pair * GROUP + g
    if SPLIT:
        at_q = at_q * spans + c
        tl.store(weights + 2 * at_q, top, mask=g < GROUP)
        tl.store(weights + 2 * at_q + 1, total, mask=g < GROUP)
    else:
        sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(o + at_q[:, None] * D + d[None, :], sums.to(o.dtype.element_ty), mask=m_q)
