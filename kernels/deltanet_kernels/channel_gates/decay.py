"""Products over pairs of tokens of a chunk with a decay per channel, in factors that neither overflow nor vanish.

    M_ij = sum_c x_ic y_jc e^{G_ic - G_jc}    (i > j)

as one product of matrices requires e^{G_i - G_m} and e^{G_m - G_j} for some token m. If the chunk decays by less than
e^-LIMIT from its first token to the middle one and from there to its last, the middle one is m for all pairs: factors
above 1 are then within the range of the dtype. Otherwise the chunk is halved, because for i >= m > j both factors are
at most 1: rows of the upper 32 tokens with columns of the lower 32, relative to the first upper token; then 16 and 16
within each half, and so on until what is left of the blocks decays by less than e^-LIMIT, or down to neighbours.

In halves, the exponents are sums of g from one side, as products with matrices of zeros and ones; differences of sums
would lose digits next to strong gates. Forward and backward passes compute the same factors.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

STRONGEST = tl.constexpr(-200.0)  # e^-200 is 0 in float32; stronger gates count as this one


@triton.jit
def token_sums(take, g, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Sums over tokens t of g [C, BK] where take [C, C] holds; float32. 16-bit products take g in two parts."""
    if dtype == tl.float32:
        ones = tl.where(take, 1.0, 0.0)
        sums = tl.dot(ones, g, input_precision="ieee" if PRECISION == "ieee" else "tf32x3")
    else:
        ones = tl.where(take, 1.0, 0.0).to(dtype)
        high = g.to(dtype)
        low = (g - high.to(tl.float32)).to(dtype)
        sums = tl.dot(ones, low)
        sums = tl.dot(ones, high, sums)
    return sums


@triton.jit
def chunk_sums(g, i, C: tl.constexpr, LIMIT: tl.constexpr):
    """G and G - G_m [C, BK] for the middle token m of the chunk, and whether m serves all pairs."""
    G = tl.cumsum(g, axis=0)
    middle = tl.sum(tl.where((i == C // 2)[:, None], G, 0.0), axis=0)
    e = G - middle[None, :]
    strongest = tl.maximum(tl.abs(e), -0.5 * G)  # G too: a closed first gate would take the digits of the differences
    return G, e, tl.max(tl.max(strongest, axis=1), axis=0) < LIMIT


@triton.jit
def since_start(g, G, mild, i, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """e^G [C, BK]: the decay from before the chunk to each token."""
    if mild:  # noqa: SIM108 (both sides of an expression would be computed)
        e = G
    else:
        e = token_sums(i[:, None] >= i[None, :], g, dtype, PRECISION)
    return tl.exp(e)


@triton.jit
def until_end(g, G, mild, i, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """e^{G_last - G} [C, BK]: the decay from each token to the chunk's last."""
    if mild:
        e = tl.minimum(tl.sum(g, axis=0)[None, :] - G, 0.0)
    else:
        e = token_sums(i[:, None] < i[None, :], g, dtype, PRECISION)
    return tl.exp(e)


@triton.jit
def half_factors(g, h, i, LIMIT: tl.constexpr, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Factors of rows and of columns [C, BK] for blocks of 2h tokens, and whether they serve all pairs of a block.

    If not, rows of the lower and columns of the upper half of each block are zero.
    """
    start = i // h * h
    upper = (i // h) % 2 == 1
    t = i[None, :]
    since = (t > start[:, None]) & (t <= i[:, None])
    until = (t > i[:, None]) & (t <= (start + h)[:, None])
    e = token_sums((upper[:, None] & since) | ((upper[:, None] == 0) & until), g, dtype, PRECISION)
    served = tl.min(tl.min(e, axis=1), axis=0) > -LIMIT
    below = tl.exp(e)
    above = tl.where(served, tl.exp(tl.minimum(-e, LIMIT)), 0.0)
    return tl.where(upper[:, None], below, above), tl.where(upper[:, None], above, below), served


@triton.jit
def pair_gradients(
    x, y, g, e, mild, dM, i, BK: tl.constexpr, C: tl.constexpr, LIMIT: tl.constexpr, dtype: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of x, y and G [C, BK] float32 from that of M, which is 0 for i < j, at dM in memory [C, C].

    dG has the rounded factors of the products, so that what a pair adds at i it takes away at j, to float32.
    """
    dx = tl.zeros([C, BK], dtype=tl.float32)
    dy = tl.zeros([C, BK], dtype=tl.float32)
    dG = tl.zeros([C, BK], dtype=tl.float32)
    # Complete tiles, masked after they are loaded: a mask that differs from element to element splits the loads.
    dM_rows = tl.load(dM + (i[:, None] * C + i[None, :]))
    dM_cols = tl.load(dM + (i[None, :] * C + i[:, None]))
    zero = tl.zeros([C, C], dtype=dtype)
    dM_rows = tl.where(i[:, None] > i[None, :], dM_rows, zero)
    dM_cols = tl.where(i[:, None] < i[None, :], dM_cols, zero)
    if mild:
        row, col = tl.exp(e), tl.exp(-e)
        x_row = (x * row).to(dtype)
        y_col = (y * col).to(dtype)
        u = tl.dot(dM_rows, y_col, input_precision=PRECISION)
        w = tl.dot(dM_cols, x_row, input_precision=PRECISION)
        dx += u * row
        dy += w * col
        dG += x_row.to(tl.float32) * u - y_col.to(tl.float32) * w
    else:
        h = tl.full([], C // 2, tl.int32)
        while h > 0:
            row, col, served = half_factors(g, h, i, LIMIT, dtype, PRECISION)
            x_row = (x * row).to(dtype)
            y_col = (y * col).to(dtype)
            same = (i[:, None] ^ i[None, :]) < 2 * h
            u = tl.dot(tl.where(same, dM_rows, zero), y_col, input_precision=PRECISION)
            w = tl.dot(tl.where(same, dM_cols, zero), x_row, input_precision=PRECISION)
            dx += u * row
            dy += w * col
            dG += x_row.to(tl.float32) * u - y_col.to(tl.float32) * w
            h = tl.where(served, 0, h // 2)
    return dx, dy, dG
