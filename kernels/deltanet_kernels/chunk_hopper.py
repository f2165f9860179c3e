"""Gated delta rule over chunks on Hopper: where the Gluon kernels serve, and their launches.

chunk_prepare_hopper.py makes what comes before the state pass in place of chunk_scores.py and chunk_prepare.py, for
keys of 64 and 128. chunk_bwd_hopper.py makes all gradients inside a chunk in place of chunk_bwd.py and
chunk_bwd_inputs.py, for keys and values of 128. The others stay the path for everything else: other chips, types and
head sizes, packed sequences, ragged lengths, several query heads a state.

Value heads that share a key head each get a program and a part of dq and dk of their own, in bfloat16, added up
afterwards (in float32): two [64, 128] sums more do not fit into the registers of a program.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from .chunk_prepare import Chunks
from .chunk_scores import empty_outputs
from .kernel_config import ChunkConfig
from .launch import launch

TRITON_VERSIONS = ((3, 6), (3, 9))
"""First and last Triton whose Gluon the kernels were compiled with; it is an experimental language."""
REGISTERS = {False: 128, True: 168}
"""A thread's in the kernel before the state pass, by whether value heads share a key head: no more spill in fewer."""


@functools.cache
def _kernel(prepare: bool) -> Any:
    """The Gluon kernel before the state pass, or that of the gradients, imported where it is first needed.

    None where this Triton has no such Gluon.
    """
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not TRITON_VERSIONS[0] <= version <= TRITON_VERSIONS[1]:
        return None
    try:
        if prepare:
            from .chunk_prepare_hopper import _prepare_chunk_kernel as kernel
        else:
            from .chunk_bwd_hopper import _chunk_gradient_kernel as kernel
    except (ImportError, AttributeError):
        return None
    return kernel


def _copied_by_16_bytes(x: torch.Tensor) -> bool:
    row, token, head, _ = x.stride()
    return x.dtype == torch.bfloat16 and x.data_ptr() % 16 == 0 and not (row | token | head) % 8


def _serves(prepare: bool, chosen: bool, full: bool, precision: str, *tiles: torch.Tensor) -> bool:
    q, k = tiles[:2]
    if not (chosen and full and precision == "tf32" and q.shape[2] == k.shape[2]):
        return False
    return all(_copied_by_16_bytes(x) for x in tiles) and _kernel(prepare) is not None


def fits(
    q: torch.Tensor, k: torch.Tensor, do: torch.Tensor, config: ChunkConfig, full: bool, precision: str
) -> bool:  # fmt: skip
    """The kernel of the gradients serves these inputs [B, T, heads, 128] (unit stride in the last dimension)."""
    return _serves(False, config.hopper_gradients, full, precision, q, k, do)


def prepares(q: torch.Tensor, k: torch.Tensor, config: ChunkConfig, full: bool, precision: str) -> bool:
    """The kernel before the state pass serves these q, k [B, T, heads, K] (unit stride along K)."""
    return _serves(True, config.hopper_prepare, full, precision, q, k)


def prepare(
    q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    A_log: torch.Tensor | None, dt_bias: torch.Tensor | None,
    chunks: Chunks, scale: float, sigmoid: bool, norm: bool, bound: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """P [chunks, HV, C, C], T [chunks, HV, C, C], row factors [10 HV, B*T], and the bounds [chunks, HV] if asked for.

    Inputs and outputs as in chunk_scores.py.
    """
    B, T, H, K = k.shape
    HV = g.shape[2]
    P, factors, bounds = empty_outputs(k, HV, HV, chunks, bound)
    inverse = torch.empty_like(P)
    if chunks.count:
        launch(
            _kernel(True), chunks.count * H,
            q, k, g, beta, A_log, dt_bias, factors, P, inverse, bounds, scale, T, B * T,
            *q.stride()[:3], *k.stride()[:3], H=H, HV=HV, K=K, NORM=norm, GATE=A_log is not None, SIGMOID=sigmoid,
            BOUND=bound, num_warps=4, maxnreg=REGISTERS[HV > H],
        )  # fmt: skip
    return P, inverse, factors, bounds


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
        _kernel(False), B * (T // 64) * HV,
        q, k, v, factors, P, do, h, dh, vn, dw, g, A_log, dt_bias, dq_parts, dk_parts, dv, dg, dbeta, gate_sums,
        scale, T, B * T, *q.stride()[:3], *k.stride()[:3], *do.stride()[:3], *v.stride()[:3], H=H, HV=HV,
        NORM=norm, GATE=A_log is not None, SIGMOID=sigmoid, num_warps=4, maxnreg=255,
    )  # fmt: skip
    if H != HV:
        launch(_add_parts_kernel, 2 * (B * T * H // 64), dq_parts, dk_parts, dq, dk, SHARE=HV // H, K=K, ROWS=64)
