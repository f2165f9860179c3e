"""Functions for Triton kernels: masked loads and stores of tiles, softplus, SiLU, the epsilon of the L2 norm."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

L2_EPS = tl.constexpr(1e-6)


@triton.jit
def load_tile(at, mask, FULL: tl.constexpr):
    """Load a tile, zero where the mask is off. FULL: the mask is on everywhere and is not evaluated."""
    return tl.load(at) if FULL else tl.load(at, mask=mask, other=0.0)


@triton.jit
def store_tile(at, x, mask, FULL: tl.constexpr):
    """Store a tile in the dtype of the memory, where the mask is on."""
    if FULL:
        tl.store(at, x.to(at.dtype.element_ty))
    else:
        tl.store(at, x.to(at.dtype.element_ty), mask=mask)


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def exact_softplus(x):
    """log(1 + e^x) without the loss of small results: log1p(e) = log(u) e / (u - 1) with u = 1 + e."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    exact = u == 1.0
    return tl.maximum(x, 0.0) + tl.where(exact, e, tl.log(u) * (e / tl.where(exact, 1.0, u - 1.0)))


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def log_decay(x, A_log):
    """g = -exp(A_log) softplus(x) in float32, of x float32, which is a + dt_bias."""
    return -tl.exp(A_log.to(tl.float32)) * exact_softplus(x)


@triton.jit
def write_strength(b, LIMIT: tl.constexpr):
    """beta = LIMIT sigmoid(b), in float32."""
    return LIMIT / (1.0 + tl.exp(-b.to(tl.float32)))
