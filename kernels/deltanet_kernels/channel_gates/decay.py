"""Products over pairs of tokens of a chunk with a decay per channel, in factors that neither overflow nor vanish.

    M_ij = sum_c x_ic y_jc e^{G_ic - G_jc}    (i > j)

as one product of matrices requires e^{G_i - G_m} and e^{G_m - G_j} for some token m. How many products a chunk takes
depends on its gates:

    ONE    no channel decays by more than e^-LIMIT from the first token to the middle one, or from there to the last:
           the middle one is m for all pairs. Factors above 1 are then within the range of the dtype.
    TWO    the same holds within each half: the half's middle token is m for its pairs. For rows of the upper half and
           columns of the lower one, the first upper token is m, and both factors are at most 1.
    MANY   halves of halves, as in TWO, until what is left of the blocks decays by less than e^-LIMIT, or down to
           neighbours. The exponents are sums of g from one side, as products with matrices of zeros and ones;
           differences of sums would lose digits next to strong gates.

Forward and backward passes compute the same factors.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

STRONGEST = tl.constexpr(-200.0)  # e^-200 is 0 in float32; stronger gates count as this one
ONE, TWO, MANY = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # products for the pairs of a chunk


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
def row_of(x, i, row: tl.constexpr):
    """Row x[row] [1, BK] of a tile x [C, BK]."""
    return tl.sum(tl.where((i == row)[:, None], x, 0.0), axis=0)[None, :]


@triton.jit
def chunk_sums(g, i, C: tl.constexpr, LIMIT: tl.constexpr):
    """G, G - G_m [C, BK] (of no use for MANY) and how many products serve the pairs: ONE, TWO or MANY."""
    G = tl.cumsum(g, axis=0)
    e = G - row_of(G, i, C // 2)
    products = tl.full([], ONE, tl.int32)
    # G too: a closed first gate would take the digits of the differences.
    if tl.max(tl.max(tl.maximum(tl.abs(e), -0.5 * G), axis=1), axis=0) >= LIMIT:
        e = G - tl.where((i < C // 2)[:, None], row_of(G, i, C // 4), row_of(G, i, C // 4 * 3))
        strongest = tl.max(tl.max(tl.maximum(tl.abs(e), -0.25 * G), axis=1), axis=0)
        products = tl.where(strongest < LIMIT, TWO, MANY)
    return G, e, products


@triton.jit
def between_halves(G, i, C: tl.constexpr):
    """Factors of rows (0 in the lower half) and columns (0 in the upper half) [C, BK] for pairs across the middle."""
    factor = tl.exp(-tl.abs(G - row_of(G, i, C // 2)))
    upper = (i >= C // 2)[:, None]
    return tl.where(upper, factor, 0.0), tl.where(upper, 0.0, factor)


@triton.jit
def since_start(g, G, products, i, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """e^G [C, BK]: the decay from before the chunk to each token."""
    e = G
    if products == MANY:
        e = token_sums(i[:, None] >= i[None, :], g, dtype, PRECISION)
    return tl.exp(e)


@triton.jit
def until_end(g, G, products, i, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """e^{G_last - G} [C, BK]: the decay from each token to the chunk's last."""
    if products == MANY:
        e = token_sums(i[:, None] < i[None, :], g, dtype, PRECISION)
    else:
        e = tl.minimum(tl.sum(g, axis=0)[None, :] - G, 0.0)
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
def add_gradients(dx, dy, dG, x, y, row, col, dM_rows, dM_cols, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """dx, dy and dG with those of one product added, whose factors are row and col [C, BK].

    dG has the rounded factors of the products, so that what a pair adds at i it takes away at j, to float32.
    """
    x_row = (x * row).to(dtype)
    y_col = (y * col).to(dtype)
    u = tl.dot(dM_rows, y_col, input_precision=PRECISION)
    w = tl.dot(dM_cols, x_row, input_precision=PRECISION)
    return dx + u * row, dy + w * col, dG + x_row.to(tl.float32) * u - y_col.to(tl.float32) * w


@triton.jit
def pair_gradients(
    x, y, g, G, e, products, dM, i, BK: tl.constexpr, C: tl.constexpr, LIMIT: tl.constexpr, dtype: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of x, y and G [C, BK] float32 from that of M, which is 0 for i < j, at dM in memory [C, C]."""
    dx = tl.zeros([C, BK], dtype=tl.float32)
    dy = tl.zeros([C, BK], dtype=tl.float32)
    dG = tl.zeros([C, BK], dtype=tl.float32)
    # Complete tiles, masked after they are loaded: a mask that differs from element to element splits the loads.
    dM_rows = tl.load(dM + (i[:, None] * C + i[None, :]))
    dM_cols = tl.load(dM + (i[None, :] * C + i[:, None]))
    zero = tl.zeros([C, C], dtype=dtype)
    dM_rows = tl.where(i[:, None] > i[None, :], dM_rows, zero)
    dM_cols = tl.where(i[:, None] < i[None, :], dM_cols, zero)
    if products == MANY:
        h = tl.full([], C // 2, tl.int32)
        while h > 0:
            row, col, served = half_factors(g, h, i, LIMIT, dtype, PRECISION)
            same = (i[:, None] ^ i[None, :]) < 2 * h
            dx, dy, dG = add_gradients(
                dx, dy, dG, x, y, row, col, tl.where(same, dM_rows, zero), tl.where(same, dM_cols, zero), dtype,
                PRECISION,
            )  # fmt: skip
            h = tl.where(served, 0, h // 2)
    else:
        if products == TWO:
            row, col = between_halves(G, i, C)
            dx, dy, dG = add_gradients(dx, dy, dG, x, y, row, col, dM_rows, dM_cols, dtype, PRECISION)
            same = (i[:, None] ^ i[None, :]) < C // 2
            dM_rows, dM_cols = tl.where(same, dM_rows, zero), tl.where(same, dM_cols, zero)
        dx, dy, dG = add_gradients(
            dx, dy, dG, x, y, tl.exp(e), tl.exp(-e), dM_rows, dM_cols, dtype, PRECISION
        )  # fmt: skip
    return dx, dy, dG
