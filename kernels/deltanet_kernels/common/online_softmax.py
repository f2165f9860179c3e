"""An online softmax in parts: a tile more, and the sum over parts that several programs have computed.

Scores are in units of log 2. A part has the maximum m of its scores, the sum t of p = 2^{s - m} and the sum a of p v;
one in which nothing is seen has -inf, 0 and 0.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOGE2 = tl.constexpr(0.6931471805599453)
HIDDEN = tl.constexpr(-1e30)  # the score of a token out of sight: finite, because -inf - -inf is NaN
COMBINED = 8192  # elements of a tile of parts


@triton.jit
def add_tile(s, v_ND, top, total, sums, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """m, t and a with one more tile of scores s [M, N], of which each row of s or m has a finite one.

    EXACT: p has the dtype of v.
    """
    higher = tl.maximum(top, tl.max(s, axis=1))
    p = tl.exp2(s - higher[:, None])
    fade = tl.exp2(top - higher)
    total = total * fade + tl.sum(p, axis=1)
    leading = p.to(v_ND.dtype)
    sums = tl.dot(leading, v_ND, sums * fade[:, None], input_precision=PRECISION)
    if not EXACT:
        sums = tl.dot((p - leading.to(tl.float32)).to(v_ND.dtype), v_ND, sums, input_precision=PRECISION)
    return higher, total, sums


@triton.jit
def combined(parts, weights, r, spans, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, GAPS: tl.constexpr):
    """The output [BD] and the log-sum-exp of the scores of number r of a [.., spans, D] and m, t [.., spans, 2].

    GAPS: parts of spans without a token are not written.
    """
    n, d = tl.arange(0, BN), tl.arange(0, BD)
    parts += r * spans * D
    weights += r * spans * 2
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    sums = tl.zeros([BD], tl.float32)
    for start in range(0, spans, BN):
        c = start + n
        m = (c < spans)[:, None] & (d < D)[None, :]
        top_N = tl.load(weights + 2 * c, mask=c < spans, other=float("-inf"))
        total_N = tl.load(weights + 2 * c + 1, mask=c < spans, other=0.0)
        if GAPS:
            m = m & (total_N > 0.0)[:, None]
        sums_ND = tl.load(parts + c[:, None] * D + d[None, :], mask=m, other=0.0)
        higher = tl.maximum(top, tl.max(top_N, axis=0))
        origin = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is NaN
        p = tl.exp2(top_N - origin)
        fade = tl.exp2(top - origin)
        total = total * fade + tl.sum(p * total_N, axis=0)
        sums = sums * fade + tl.sum(p[:, None] * sums_ND, axis=0)
        top = higher
    output = sums / tl.where(total == 0.0, 1.0, total)  # 0 where nothing is seen
    return output, (top + tl.log2(total)) / LOG2E


@triton.jit(do_not_specialize=["spans"])
def combine_kernel(
    parts, weights, o, lse, spans, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, GAPS: tl.constexpr
):
    """One program per row and query head: o [B, HQ, D] from a [B, HQ, spans, D] and m, t [B, HQ, spans, 2].

    The log-sum-exp of the scores goes to lse [B, HQ], if it is not None.
    """
    r = tl.program_id(0).to(tl.int64)
    output, lse_r = combined(parts, weights, r, spans, D, BD, BN, GAPS)
    if lse is not None:
        tl.store(lse + r, lse_r)
    d = tl.arange(0, BD)
    tl.store(o + r * D + d, output.to(o.dtype.element_ty), mask=d < D)
