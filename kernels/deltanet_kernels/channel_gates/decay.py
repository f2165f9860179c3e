"""Products over pairs of tokens of a chunk with a decay per channel, in factors that neither overflow nor vanish.

    M_ij = sum_c x_ic y_jc e^{G_ic - G_jc}    (i > j)

as one product of matrices requires e^{G_i - G_m} and e^{G_m - G_j} for some token m. For i >= m > j both are at most 1,
so the chunk is halved: rows of the upper 32 tokens with columns of the lower 32, relative to the first upper token;
then 16 and 16 within each half, and so on down to neighbours. If no exponent within the remaining blocks is beyond
`LIMIT`, one product gives all of their pairs: then e^{G_i - G_m} for i < m and e^{G_m - G_j} for j >= m, which are
above 1, are within the range of the dtype too. Gates that decay less than e^-LIMIT in half a chunk take one product.

The exponents are sums of g from one side, as products with matrices of zeros and ones; differences of sums would lose
digits next to strong gates. Forward and backward passes compute the same factors.
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
    mild = tl.min(tl.min(e, axis=1), axis=0) > -LIMIT
    below = tl.exp(e)
    above = tl.where(mild, tl.exp(tl.minimum(-e, LIMIT)), 0.0)
    return tl.where(upper[:, None], below, above), tl.where(upper[:, None], above, below), mild


@triton.jit
def pair_products(
    x, y, g, i, C: tl.constexpr, LIMIT: tl.constexpr, dtype: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """M [C, C] of the module's docstring from x, y, g [C, BK] float32; 0 for i <= j."""
    M = tl.zeros([C, C], dtype=tl.float32)
    h = tl.full([], C // 2, tl.int32)
    while h > 0:
        row, col, mild = half_factors(g, h, i, LIMIT, dtype, PRECISION)
        product = tl.dot((x * row).to(dtype), tl.trans((y * col).to(dtype)), input_precision=PRECISION)
        near = (i[:, None] > i[None, :]) & ((i[:, None] ^ i[None, :]) < 2 * h)
        M += tl.where(near, product, 0.0)
        h = tl.where(mild, 0, h // 2)
    return M


@triton.jit
def pair_gradients(
    x, y, g, dM, i, BK: tl.constexpr, C: tl.constexpr, LIMIT: tl.constexpr, dtype: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of x, y and G [C, BK] float32 from that of M at dM in memory [C, C].

    dG has the rounded factors of the products, so that what a pair adds at i it takes away at j, to float32.
    """
    dx = tl.zeros([C, BK], dtype=tl.float32)
    dy = tl.zeros([C, BK], dtype=tl.float32)
    dG = tl.zeros([C, BK], dtype=tl.float32)
    h = tl.full([], C // 2, tl.int32)
    while h > 0:
        row, col, mild = half_factors(g, h, i, LIMIT, dtype, PRECISION)
        same = (i[:, None] ^ i[None, :]) < 2 * h
        x_row = (x * row).to(dtype)
        y_col = (y * col).to(dtype)
        dM_rows = tl.load(dM + (i[:, None] * C + i[None, :]), mask=same & (i[:, None] > i[None, :]), other=0.0)
        u = tl.dot(dM_rows, y_col, input_precision=PRECISION)
        dM_cols = tl.load(dM + (i[None, :] * C + i[:, None]), mask=same & (i[:, None] < i[None, :]), other=0.0)
        w = tl.dot(dM_cols, x_row, input_precision=PRECISION)
        dx += u * row
        dy += w * col
        dG += x_row.to(tl.float32) * u - y_col.to(tl.float32) * w
        h = tl.where(mild, 0, h // 2)
    return dx, dy, dG
