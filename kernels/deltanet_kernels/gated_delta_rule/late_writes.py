"""Late writes in the kernels of step.py: what waits beside a state S_0, and its fold into S_0.

    S = (e_1 ... e_n) S_0 + sum_i (e_(i+1) ... e_n) k_i u_i^T

with the decay factors e_i, unit keys k_i and values u_i of n writes; `StepCall` has the shapes. All pointers are those
of one state.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def late_weights(decay, count, PLACES: tl.constexpr):
    """The factor of each write [PLACES], 1 where none waits, and that of S_0."""
    i = tl.arange(0, PLACES)
    after = (i[None, :] > i[:, None]) & (i < count)[None, :]
    factors = tl.load(decay + i[None, :] + i[:, None] * 0, mask=after, other=1.0)
    own = tl.load(decay + i, mask=i < count, other=1.0)
    return tl.reduce(factors, 1, _multiply), tl.reduce(own, 0, _multiply)


@triton.jit
def late_keys(writes, count, d, md, FORM: tl.constexpr):
    """Keys [PLACES, BK] float32, 0 where none waits."""
    i = tl.arange(0, FORM.PLACES)
    at = writes + i[:, None] * (FORM.K + FORM.V) + d[None, :]
    return tl.load(at, mask=(i < count)[:, None] & md[None, :], other=0.0).to(tl.float32)


@triton.jit
def late_values(writes, count, e, PLACES: tl.constexpr, FORM: tl.constexpr):
    """Values of columns e [PLACES, slice], 0 where none waits."""
    i = tl.arange(0, PLACES)
    at = writes + i[:, None] * (FORM.K + FORM.V) + FORM.K + e[None, :]
    return tl.load(at, mask=(i < count)[:, None] & (e < FORM.V)[None, :], other=0.0)


@triton.jit
def late_products(x, keys, weights):
    """Products of x [BK] with the keys of all writes [PLACES], as much as is left of them."""
    return weights * tl.sum(keys * x[None, :], axis=1)


@triton.jit
def fold(state, scale, writes, decay, count, FORM: tl.constexpr):
    """Write the current state to S_0, ROWS rows at a time; the caller counts from 0 again."""
    DEPTH: tl.constexpr = FORM.PLACES if FORM.PLACES > 16 else 16  # the least of a product
    f = tl.arange(0, FORM.BV)
    i = tl.arange(0, DEPTH)
    mf = f < FORM.V
    waits = i < count
    weights, faded = late_weights(decay, count, DEPTH)
    values = late_values(writes, count, f, DEPTH, FORM).to(tl.float32)
    for first in range(0, FORM.K, FORM.ROWS):
        d = first + tl.arange(0, FORM.ROWS)
        md = d < FORM.K
        m = md[:, None] & mf[None, :]
        at = state + d[:, None] * FORM.V + f[None, :]
        old = tl.load(at, mask=m, other=0.0).to(tl.float32) * faded
        if scale is not None:
            old *= tl.load(scale + d, mask=md, other=0.0)[:, None]
        at_keys = writes + i[None, :] * (FORM.K + FORM.V) + d[:, None]
        keys = tl.load(at_keys, mask=md[:, None] & waits[None, :], other=0.0).to(tl.float32)
        new = tl.dot(keys * weights[None, :], values, old, input_precision=FORM.PRECISION)
        if scale is not None:
            largest = tl.max(tl.abs(new), axis=1)
            tl.store(scale + d, largest / 127.0, mask=md)
            new = tl.floor(new * tl.where(largest > 0.0, 127.0 / largest, 0.0)[:, None] + 0.5)
        tl.store(at, new.to(state.dtype.element_ty), mask=m)
    tl.debug_barrier()  # other threads read what this one has written


@triton.jit
def _multiply(a, b):
    return a * b
