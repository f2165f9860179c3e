"""Parts of the kernels that put a token into a cache: its number, by tickets as in window/step.py, and its rotation."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

COUNT_BITS = 23  # of the 31 below the sign; the tickets have the others
MAX_PROGRAMS = 2 ** (31 - COUNT_BITS) - 1  # per row


@triton.jit
def take_ticket(count, b, live, PROGRAMS: tl.constexpr, COUNT_BITS: tl.constexpr):
    """The number of the row's token, or of its last one if it is padding; the last program writes it."""
    if PROGRAMS == 1:
        number = tl.load(count + b) + live
        tl.store(count + b, number)
    else:
        taken = tl.atomic_add(count + b, 1 << COUNT_BITS, sem="relaxed")
        number = (taken & ((1 << COUNT_BITS) - 1)) + live
        tl.store(count + b, number, mask=(taken >> COUNT_BITS) == PROGRAMS - 1)
    return number


@triton.jit
def turned(
    x, cos, sin, b, d, m, R: tl.constexpr, ROPE_ROWS: tl.constexpr,
):  # fmt: skip
    """Channels d (masked by m) of the heads at x in float32; the first R are rotated, then rounded as in the cache."""
    y = tl.load(x + d, mask=m, other=0.0).to(tl.float32)
    if R > 0:
        partner = tl.load(x + tl.where(d < R // 2, d + R // 2, d - R // 2), mask=m & (d < R), other=0.0).to(tl.float32)
        at = (b if ROPE_ROWS else b * 0) * R + d
        y = y * tl.load(cos + at, mask=d < R, other=1.0).to(tl.float32)
        y += tl.where(d < R // 2, -partner, partner) * tl.load(sin + at, mask=d < R, other=0.0).to(tl.float32)
        y = y.to(x.dtype.element_ty).to(tl.float32)
    return y
