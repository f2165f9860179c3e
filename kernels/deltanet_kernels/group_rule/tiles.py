"""Functions that the kernels of the rule read at boundaries share: decays around the boundary in a chunk, and a read.

A chunk has C = 32 or 64 tokens, so one group or two, which are its halves. Tiles of a group have 32 rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.tiles import load_tile, store_tile
from deltanet_kernels.gated_delta_rule.row_factors import row_norm_factor


@triton.jit
def middle_decays(rows, plane, i, valid, FULL: tl.constexpr):
    """Decays around the boundary after the 32nd token of a chunk of 64, from G and s (row_factors.py).

    From each token of the first half to the boundary [32], over the first half, and over the second half.
    """
    last = rows + valid - 1
    middle = rows + tl.minimum(valid, 32) - 1
    G, s = load_tile(rows + i, i < valid, FULL), load_tile(rows + plane + i, i < valid, FULL)
    G_middle, s_middle = tl.load(middle), tl.load(middle + plane)
    until = tl.where(s == s_middle, tl.exp(tl.minimum(G_middle - G, 0.0)), 0.0)
    first = tl.where(s_middle > 0.0, 0.0, tl.exp(G_middle))
    second = tl.where(tl.load(last + plane) > s_middle, 0.0, tl.exp(tl.minimum(tl.load(last) - G_middle, 0.0)))
    return until, first, second


@triton.jit
def read_state(
    S, q_at, o_at, reads, gamma, scale, i, i_v, live, md, me,
    FULL: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the outputs of a group, scale (Q S)^T [BV, 32], from the state [BV, K] in the dtype of q.

    KEEP: the program of slice 0 of V also stores the factors of the output head (row_factors.py). gamma is what the
    state has decayed by since the start of the chunk.
    """
    q_tile = load_tile(q_at, live[:, None] & md[None, :], FULL)
    f = tl.zeros([32], dtype=tl.float32) + 1.0
    if NORM:
        f = row_norm_factor(q_tile)
    out = tl.dot(S, tl.trans(q_tile), input_precision=PRECISION) * (f * scale)[None, :]
    store_tile(o_at, out, me[:, None] & live[None, :], FULL)
    if KEEP:
        stored = live & (i_v + 0 * i == 0)
        tl.store(reads + 4 * i, f, mask=stored)
        tl.store(reads + 4 * i + 1, f * scale * gamma, mask=stored)
        tl.store(reads + 4 * i + 2, f * scale, mask=stored)
