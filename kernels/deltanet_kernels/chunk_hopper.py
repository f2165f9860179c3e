"""Gated delta rule over chunks, backward on Hopper: where the Gluon kernel of chunk_bwd_hopper.py serves, its launch.

It makes all gradients inside a chunk in place of the two kernels of chunk_bwd.py and chunk_bwd_inputs.py, which stay
the path for everything else: other chips, types and head sizes, packed sequences, ragged lengths, several query heads
a state. Value heads that share a key head each get a program and a part of dq and dk of their own, in bfloat16, added
up afterwards (in float32): two [64, 128] sums more do not fit into the registers of a program.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from .kernel_config import ChunkConfig
from .launch import launch

TRITON_VERSIONS = ((3, 6), (3, 9))
"""First and last Triton whose Gluon the kernel was compiled with; it is an experimental language."""


@functools.cache
def _kernel() -> Any:
    """The Gluon kernel, imported where it is first needed; None where this Triton has no such Gluon."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not TRITON_VERSIONS[0] <= version <= TRITON_VERSIONS[1]:
        return None
    try:
        from .chunk_bwd_hopper import _chunk_gradient_kernel
    except (ImportError, AttributeError):
        return None
    return _chunk_gradient_kernel


def _copied_by_16_bytes(x: torch.Tensor) -> bool:
    row, token, head, _ = x.stride()
    return x.dtype == torch.bfloat16 and x.data_ptr() % 16 == 0 and not (row | token | head) % 8


def fits(
    q: torch.Tensor, k: torch.Tensor, do: torch.Tensor, config: ChunkConfig, full: bool, precision: str
) -> bool:  # fmt: skip
    """The Gluon kernel serves these inputs [B, T, heads, 128] (unit stride in the last dimension)."""
    if not (config.hopper and full and precision == "tf32" and q.shape[2] == k.shape[2]):
        return False
    return all(_copied_by_16_bytes(x) for x in (q, k, do)) and _kernel() is not None


@triton.jit
def _add_parts_kernel(dq_parts, dk_parts, dq, dk, SHARE: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    """One program so many (token, key head) of dq or dk: the sum over the value heads of a key head."""
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


def gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, factors: torch.Tensor, P: torch.Tensor, do: torch.Tensor,
    h: torch.Tensor, dh: torch.Tensor, vn: torch.Tensor, dw: torch.Tensor, g: torch.Tensor,
    A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor,
    dg: torch.Tensor, dbeta: torch.Tensor, gate_sums: torch.Tensor, scale: float, norm: bool, sigmoid: bool,
) -> None:  # fmt: skip
    """Fill dq, dk, dv, dg, dbeta and gate_sums; notation and shapes as in chunk.py."""
    (B, T, H, K), HV = k.shape, v.shape[2]
    dq_parts, dk_parts = (dq, dk) if H == HV else (torch.empty_like(dv) for _ in range(2))
    launch(
        _kernel(), B * (T // 64) * HV,
        q, k, v, factors, P, do, h, dh, vn, dw, g, A_log, dt_bias, dq_parts, dk_parts, dv, dg, dbeta, gate_sums,
        scale, T, B * T, *q.stride()[:3], *k.stride()[:3], *do.stride()[:3], *v.stride()[:3], H=H, HV=HV,
        NORM=norm, GATE=A_log is not None, SIGMOID=sigmoid, num_warps=4, maxnreg=255,
    )  # fmt: skip
    if H != HV:
        launch(_add_parts_kernel, 2 * (B * T * H // 64), dq_parts, dk_parts, dq, dk, SHARE=HV // H, K=K, ROWS=64)
