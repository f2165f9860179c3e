"""Scores of the attention over window and sinks from products of queries and keys, with or without a soft cap.

Kernels multiply the products by `factor`: scale log2(e) without a cap, so that exponentials are powers of 2. With a
cap C it is scale / C, and a score is C log2(e) u with u = tanh(product * factor); the slope of the cap is 1 - u^2.
CAP is a constant of the kernel, None for no cap: kernels without one hold no trace of it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from deltanet_kernels.common.online_softmax import LOG2E


@triton.jit
def tanh(x):
    """Hyperbolic tangent of float32 to two units of the last digit; 1 - 2 / (1 + e^2x) loses all digits at 0."""
    u = x * x
    near = x + x * u * (-0.33332597 + u * (0.13313116 + u * (-0.05221179 + u * 0.01561261)))  # least error up to 0.6
    t = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - t) / (1.0 + t)
    return tl.where(u < 0.36, near, tl.where(x < 0.0, -far, far))


@triton.jit
def cap_score(x, CAP: tl.constexpr):
    """The score in units of log 2 of a product x that has its factor."""
    if CAP is not None:
        x = tanh(x) * (CAP * LOG2E)
    return x
