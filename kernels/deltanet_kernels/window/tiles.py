"""Functions that the kernels of the attention over window and sinks share."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.sequences import locate_chunk


@triton.jit
def locate_tile(c, cu_seqlens, row_of_chunk, first_chunk, T, C: tl.constexpr, VARLEN: tl.constexpr):
    """Chunk c of C tokens -> (batch row, first token of its sequence in that row, and of all; length of the sequence;
    the chunk's position in the sequence, and its tokens: 0 if it is unused)."""
    row, first, flat, valid = locate_chunk(c, cu_seqlens, row_of_chunk, first_chunk, T, C, VARLEN)
    if VARLEN:
        n = tl.maximum(tl.load(row_of_chunk + c), 0)
        begin = tl.load(cu_seqlens + n).to(tl.int64)
        length = (tl.load(cu_seqlens + n + 1) - begin).to(tl.int32)
    else:
        begin = row * 0
        length = T
    position = (first - begin).to(tl.int32)
    return row, begin, flat - position, length, position, valid


@triton.jit
def load_rows(x, at, token, length, d, D: tl.constexpr):
    """Tokens `at` of x [length, D], whose rows are `token` elements apart; zero past the length."""
    m = (at < length)[:, None] & (d < D)[None, :]
    return tl.load(x + at.to(tl.int64)[:, None] * token + d[None, :], mask=m, other=0.0)


@triton.jit
def store_rows(x, at, token, length, d, D: tl.constexpr, value):
    m = (at < length)[:, None] & (d < D)[None, :]
    tl.store(x + at.to(tl.int64)[:, None] * token + d[None, :], value.to(x.dtype.element_ty), mask=m)


@triton.jit
def in_window(i, j, window, EDGE: tl.constexpr):
    """Whether queries i see keys j through the window."""
    return (j <= i) & (i // EDGE * EDGE - j < window)


@triton.jit
def is_partly_seen(start, position, last, window, BM: tl.constexpr, BN: tl.constexpr):
    """Whether some of BM queries from `position` on may not see some of the BN keys from `start` on, where all queries
    see the keys before `last` as far as the window reaches."""
    return (start < position + BM - window) | (start + BN > last)


@triton.jit
def in_sinks(i, j, window, SINKS: tl.constexpr, EDGE: tl.constexpr):
    """Whether queries i see keys j as sinks and not through the window."""
    return (j < SINKS) & (i // EDGE * EDGE - j >= window)
