"""Log decay and write strength of the gated delta rule from their logits, in one kernel.

g = -exp(A_log) softplus(a + dt_bias);  beta = limit sigmoid(b)        in float32
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import operator
from deltanet_kernels.common.rows import rows
from deltanet_kernels.common.sizes import cdiv
from deltanet_kernels.common.tiles import log_decay, write_strength
from deltanet_kernels.prompt.calls import GateValuesCall

BLOCK = 512


@triton.jit
def gate_values_kernel(
    a, b, A_log, dt_bias, g, beta, size, H: tl.constexpr, A_ROW: tl.constexpr, B_ROW: tl.constexpr,
    LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK gates; rows of a and b, of H gates, are A_ROW and B_ROW elements apart."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = i < size
    row, head = i // H, i % H
    x = tl.load(a + row * A_ROW + head, mask=m, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head, mask=m, other=0.0).to(tl.float32)
    tl.store(g + i, log_decay(x, tl.load(A_log + head, mask=m, other=0.0)), mask=m)
    y = tl.load(b + row * B_ROW + head, mask=m, other=0.0)
    tl.store(beta + i, write_strength(y, LIMIT), mask=m)


def _fake_gate_values(call: GateValuesCall):
    a, b = call.a, call.b
    return a.new_empty(a.shape, dtype=torch.float32), b.new_empty(b.shape, dtype=torch.float32)


@operator(_fake_gate_values)
def gate_values_op(call: GateValuesCall) -> tuple[torch.Tensor, torch.Tensor]:
    """g and beta [B, T, H] float32."""
    g, beta = _fake_gate_values(call)
    (a, a_row), (b, b_row) = rows(call.a), rows(call.b)
    launch(
        gate_values_kernel, cdiv(g.numel(), BLOCK),
        a, b, call.A_log.contiguous(), call.dt_bias.contiguous(), g, beta, g.numel(),
        H=a.shape[2], A_ROW=a_row, B_ROW=b_row, LIMIT=call.limit, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return g, beta


def gate_values_triton(call: GateValuesCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`deltanet_kernels.gate_values` in Triton, for checked arguments.

    Raises:
        NotImplementedError: float64.
    """
    if torch.float64 in (call.a.dtype, call.b.dtype):
        raise NotImplementedError("dtype torch.float64: the kernels compute in float32")
    return gate_values_op(call)
