"""silu(gate) * up in one kernel, with the roundings of the modules that it stands for: silu(gate) is rounded first.

It is what lies between the projections of a decoder layer's feed-forward block.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from deltanet_kernels.arguments import SiluProductCall
from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import operator
from deltanet_kernels.common.rows import rows
from deltanet_kernels.common.sizes import cdiv
from deltanet_kernels.common.tiles import silu

BLOCK = 1024  # channels of a program


@triton.jit
def _silu_product_kernel(
    gate, up, y, GATE_ROW: tl.constexpr, UP_ROW: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token and BLOCK of its D channels; tokens of gate and up are X_ROW elements apart."""
    BLOCKS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    r = (tl.program_id(0) // BLOCKS).to(tl.int64)
    c = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    m = c < D
    x = tl.load(gate + r * GATE_ROW + c, mask=m, other=0.0).to(tl.float32)
    x = silu(x).to(y.dtype.element_ty).to(tl.float32)
    x = x * tl.load(up + r * UP_ROW + c, mask=m, other=0.0).to(tl.float32)
    tl.store(y + r * D + c, x.to(y.dtype.element_ty), mask=m)


def _fake_silu_product(call: SiluProductCall):
    return torch.empty(call.gate.shape, dtype=call.gate.dtype, device=call.gate.device)


@operator(_fake_silu_product)
def silu_product_op(call: SiluProductCall) -> torch.Tensor:
    """Return silu(gate) * up in the shape of gate, contiguous."""
    y = call.gate.new_empty(call.gate.shape)
    (gate, gate_row), (up, up_row) = rows(call.gate), rows(call.up)
    D = y.shape[-1]
    launch(
        _silu_product_kernel, y.numel() // D * cdiv(D, BLOCK),
        gate, up, y, GATE_ROW=gate_row, UP_ROW=up_row, D=D, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return y


def silu_product_triton(call: SiluProductCall) -> torch.Tensor:
    """`deltanet_kernels.silu_product` in Triton, for checked arguments.

    Raises:
        NotImplementedError: float64.
    """
    if call.gate.dtype == torch.float64:
        raise NotImplementedError("dtype torch.float64: the kernels compute in float32")
    return silu_product_op(call)
