"""The last steps of the backward kernels: from gradients of normalised rows and log decays to those of the inputs."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.tiles import load_tile, softplus


@triton.jit
def raw_gradient(x, dx, factor, NORM: tl.constexpr):
    """Gradient of the raw rows x from dx = factor * (gradient of the unit rows factor * x).

    The sum is over unit rows: of two equal sums x dx, one before and one after a product that adds to dx, ptxas 12.8
    and 12.9 keep one, that after it (seen with Triton 3.9: dG took the wrong one).
    """
    if NORM:
        x = factor[:, None] * x.to(tl.float32)
        dx -= tl.sum(x * dx, axis=1)[:, None] * x
    return dx


@triton.jit
def store_gate_gradient(dg_i, g, A_log, dt_bias, dg, sums, at, head, live, FULL: tl.constexpr):
    """Store dg of a chunk's tokens; with A_log, that of the raw logits, and the chunk's part of dA_log and ddt_bias."""
    if A_log is not None:
        a = load_tile(g + at, live, FULL).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
        rate = tl.exp(tl.load(A_log + head).to(tl.float32))
        tl.store(sums, tl.sum(tl.where(live, -rate * softplus(a) * dg_i, 0.0), axis=0))
        dg_i = -rate / (1.0 + tl.exp(-a)) * dg_i
        tl.store(sums + 1, tl.sum(tl.where(live, dg_i, 0.0), axis=0))
    tl.store(dg + at, dg_i.to(dg.dtype.element_ty), mask=live)
