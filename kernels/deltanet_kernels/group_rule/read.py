"""The rule read at boundaries: the outputs of a group of 32 tokens from the state before it."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.tiles import load_tile, store_tile
from deltanet_kernels.gated_delta_rule.row_factors import row_norm_factor


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
