"""Imports and launches the Gluon kernels for Hopper (sm_90); `chips.KERNELS` says which calls they serve.

solve.py computes scores, inverse and row factors in place of ../scores.py and ../solve.py, gradients_128.py all
gradients within a chunk in place of ../gradients_pairs.py and ../gradients_inputs.py.

Where value heads share a key head, each value head has a program and writes its part of dq and dk in bfloat16. A
second kernel adds the parts in float32: two more [64, 128] sums do not fit into the registers of a program.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from deltanet_kernels.common.launch import launch
from deltanet_kernels.gated_delta_rule.chips import HOPPER_SOLVE, Kernel
from deltanet_kernels.gated_delta_rule.row_factors import ChunkInputs, ChunkTensors, empty_scores

TRITON_VERSIONS = ((3, 6), (3, 9))
"""First and last Triton version whose Gluon the kernels were compiled with; Gluon is an experimental language."""
SOLVE_REGISTERS = 128
"""Registers per thread of the kernel in solve.py; with fewer, values spill."""
SHARED_KEY_SOLVE_REGISTERS = 168
"""The same where value heads share a key head, which requires more registers."""


def gluon_supported() -> bool:
    """Whether the installed Triton has the Gluon that the kernels were written for."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return TRITON_VERSIONS[0] <= version <= TRITON_VERSIONS[1]


@functools.cache
def solve_kernel() -> Any:
    """The kernel of solve.py, imported at its first use; None if this Triton cannot import it."""
    if not gluon_supported():
        return None
    try:
        from deltanet_kernels.gated_delta_rule.hopper.solve import scores_and_inverse_kernel
    except (ImportError, AttributeError):
        return None
    return scores_and_inverse_kernel


@functools.cache
def gradients_kernel() -> Any:
    """The kernel of gradients_128.py, imported at its first use; None if this Triton cannot import it."""
    if not gluon_supported():
        return None
    try:
        from deltanet_kernels.gated_delta_rule.hopper.gradients_128 import gradients_128_kernel
    except (ImportError, AttributeError):
        return None
    return gradients_128_kernel


def imported(kernel: Kernel) -> Any:
    """The function of a Gluon kernel in `chips.KERNELS`; None if this Triton cannot import it."""
    return solve_kernel() if kernel is HOPPER_SOLVE else gradients_kernel()


def copied_by_16_bytes(x: torch.Tensor) -> bool:
    """Whether all rows of bfloat16 x [B, T, heads, K] (unit stride along K) begin at multiples of 16 bytes."""
    row, token, head, _ = x.stride()
    return x.dtype == torch.bfloat16 and x.data_ptr() % 16 == 0 and not (row | token | head) % 8


def launch_solve(inputs: ChunkInputs) -> ChunkTensors:
    """Scores, inverse, row factors and bounds, in the layouts of scores.py and solve.py."""
    q, k, g, beta, A_log, dt_bias, chunks, scale, sigmoid, norm, bound, *_ = inputs
    B, T, H, K = k.shape
    HV = g.shape[2]
    P, factors, bounds = empty_scores(inputs)
    inverse = k.new_empty(chunks.count, HV, chunks.size, chunks.size)
    if chunks.count:
        launch(
            solve_kernel(), chunks.count * H,
            q, k, g, beta, A_log, dt_bias, factors, P, inverse, bounds, scale, T, B * T,
            *q.stride()[:3], *k.stride()[:3], H=H, HV=HV, K=K, NORM=norm, GATE=A_log is not None, SIGMOID=sigmoid,
            BOUND=bound, SCORES=inputs.scores, num_warps=4,
            maxnreg=SHARED_KEY_SOLVE_REGISTERS if HV > H else SOLVE_REGISTERS,
        )  # fmt: skip
    return ChunkTensors(P, inverse, factors, bounds)


@triton.jit
def add_parts_kernel(dq_parts, dk_parts, dq, dk, SHARE: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    """Sum dq and dk over the value heads of a key head: one program per ROWS (token, key head) rows of dq or dk."""
    pid = tl.program_id(0)
    source, target = dq_parts, dq
    if pid % 2 == 1:
        source, target = dk_parts, dk
    row = (pid // 2).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, K)[None, :]
    total = tl.zeros([ROWS, K], dtype=tl.float32)
    for x in tl.static_range(SHARE):
        total += tl.load(source + ((row * SHARE + x) * K)[:, None] + d).to(tl.float32)
    tl.store(target + (row * K)[:, None] + d, total.to(target.dtype.element_ty))


def launch_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, factors: torch.Tensor, P: torch.Tensor, do: torch.Tensor,
    h: torch.Tensor, dh: torch.Tensor, vn: torch.Tensor, dw: torch.Tensor, g: torch.Tensor,
    A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor,
    dg: torch.Tensor, dbeta: torch.Tensor, gate_sums: torch.Tensor, scale: float, norm: bool, sigmoid: bool,
    groups: bool = False,
) -> None:  # fmt: skip
    """Fill dq, dk, dv, dg, dbeta and gate_sums; names and shapes as in chunk_backward.py. `groups`: P is not read."""
    (B, T, H, K), HV = k.shape, v.shape[2]
    dq_parts, dk_parts = (dq, dk) if H == HV else (torch.empty_like(dv) for _ in range(2))
    launch(
        gradients_kernel(), B * (T // 64) * HV,
        q, k, v, factors, P, do, h, dh, vn, dw, g, A_log, dt_bias, dq_parts, dk_parts, dv, dg, dbeta, gate_sums,
        scale, T, B * T, *q.stride()[:3], *k.stride()[:3], *do.stride()[:3], *v.stride()[:3], H=H, HV=HV,
        NORM=norm, GATE=A_log is not None, SIGMOID=sigmoid, GROUPS=groups, num_warps=4, maxnreg=255,
    )  # fmt: skip
    if H != HV:
        launch(add_parts_kernel, 2 * (B * T * H // 64), dq_parts, dk_parts, dq, dk, SHARE=HV // H, K=K, ROWS=64)
