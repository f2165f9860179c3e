"""RMSNorm of a residual sum in one kernel, with the roundings of the modules that it stands for.

    t = x + residual, rounded                     optional, and written to `total`
    n = t / sqrt(mean t^2 + eps)                  in float32
    y = weight * round(n)                         with round_first, as Llama
    y = (offset + weight) * n                     otherwise: offset 0 as OLMo 2, 1 as Gemma

`norm.py` has the differentiable norm of a head's output. Products are not contracted with sums here, and the mean is
the sum times 1 / D, both as in PyTorch's own kernels; only the order of the sum differs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from deltanet_kernels.arguments import RMSNormCall
from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import operator
from deltanet_kernels.common.rows import rows
from deltanet_kernels.common.sizes import power_of_two

PER_WARP = 512  # elements of a row
MAX_WARPS = 16
MAX_SIZE = 2**16  # elements of a row, which one program holds


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, total, y, eps, HEADS: tl.constexpr, X_ROW: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    INVERSE: tl.constexpr, OFFSET: tl.constexpr, ROUND_FIRST: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """One program per row of D; X_ROW elements of x lie between the starts of tokens of HEADS rows each."""
    r = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    m = d < D
    at = r * D + d
    t_D = tl.load(x + (r // HEADS) * X_ROW + (r % HEADS) * D + d, mask=m, other=0.0)
    w_D = tl.load(weight + d, mask=m, other=0.0).to(tl.float32)
    if ADD:
        t_D = t_D.to(tl.float32) + tl.load(residual + at, mask=m, other=0.0).to(tl.float32)
        t_D = t_D.to(total.dtype.element_ty)
        tl.store(total + at, t_D, mask=m)
    t_D = t_D.to(tl.float32)
    n_D = t_D * tl.rsqrt(tl.sum(t_D * t_D, axis=0) * INVERSE + eps)
    if ROUND_FIRST:
        n_D = n_D.to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + at, (n_D * (w_D + OFFSET)).to(y.dtype.element_ty), mask=m)


def _fake_rms_norm(call: RMSNormCall):
    return torch.empty(call.x.shape, dtype=call.x.dtype, device=call.x.device)


@operator(_fake_rms_norm, mutates=("total",))
def rms_norm_op(call: RMSNormCall) -> torch.Tensor:
    """Return y in the shape of x, contiguous, and write the contiguous `total`."""
    x, residual = call.x, call.residual
    D = x.shape[-1]
    y = x.new_empty(x.shape)
    if x.numel() == 0:
        return y
    x, row = rows(x if x.dim() > 2 else x.reshape(1, -1, D))
    size = power_of_two(D, 1)
    launch(
        _rms_norm_kernel, y.numel() // D,
        x, None if residual is None else residual.contiguous(), call.weight.contiguous(), call.total, y, call.eps,
        HEADS=x.shape[2:].numel() // D, X_ROW=row, D=D, BD=size, INVERSE=1 / D, OFFSET=call.offset,
        ROUND_FIRST=call.round_first, ADD=residual is not None,
        num_warps=min(MAX_WARPS, power_of_two(size // PER_WARP, 1)), enable_fp_fusion=False,
    )  # fmt: skip
    return y


def rms_norm_triton(call: RMSNormCall) -> torch.Tensor:
    """`deltanet_kernels.rms_norm` in Triton, for checked arguments.

    Raises:
        NotImplementedError: float64, or rows of more than 65,536 elements.
    """
    x = call.x
    if x.dtype == torch.float64:
        raise NotImplementedError("dtype torch.float64: the kernels compute in float32")
    if x.shape[-1] > MAX_SIZE:
        raise NotImplementedError(f"rows of {x.shape[-1]} elements: the kernel takes up to {MAX_SIZE}")
    return rms_norm_op(call)
