"""Gated RMSNorm, forward and backward in one kernel each.

    y = n w silu(z),  n = x / rms(x),  rms(x) = sqrt(mean x^2 + eps)

    dn = dy w silu(z);  dx = (dn - n mean(n dn)) / rms(x);  dw = sum dy n silu(z);  dz = dy n w silu'(z)

w is [D], or [H, D] for x [..., H, D]. Each program of the backward kernel processes rows of one head and writes one
partial dw; the partial sums are added afterwards in a fixed order. Computes in float32.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from deltanet_kernels.arguments import GatedNormCall
from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import differentiable_call, operator
from deltanet_kernels.common.rows import rows as token_rows
from deltanet_kernels.common.sizes import cdiv, power_of_two

ROWS = 32  # rows of D per tile
TILES = 4  # tiles per program: fewer partial sums of dw


@triton.jit
def _norm_forward_kernel(
    x, z, w, y, rows, eps, HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
    GATE: tl.constexpr, Z_HEADS: tl.constexpr, Z_ROW: tl.constexpr,
):  # fmt: skip
    """One program per ROWS rows of D; Z_ROW elements of z lie between the starts of tokens of Z_HEADS rows each."""
    tile = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    r = tile * ROWS + tl.arange(0, ROWS)
    m = (r < rows)[:, None] & (d < D)[None, :]
    at = r[:, None] * D + d[None, :]
    x_RD = tl.load(x + at, mask=m, other=0.0).to(tl.float32)
    w_RD = tl.load(w + (r % HEADS)[:, None] * D + d[None, :], mask=m, other=0.0).to(tl.float32)
    y_RD = x_RD * tl.rsqrt(tl.sum(x_RD * x_RD, axis=1) / D + eps)[:, None] * w_RD
    if GATE:
        z_at = (r // Z_HEADS)[:, None] * Z_ROW + (r % Z_HEADS)[:, None] * D + d[None, :]
        z_RD = tl.load(z + z_at, mask=m, other=0.0).to(tl.float32)
        y_RD = y_RD * z_RD / (1.0 + tl.exp(-z_RD))
    tl.store(y + at, y_RD.to(y.dtype.element_ty), mask=m)


@triton.jit
def _norm_backward_kernel(
    x, z, w, dy, dx, dz, dw, rows, eps, HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Program (p, h) computes TILES tiles of rows of head h, and a partial dw [programs, HEADS, D]."""
    head = tl.program_id(0) % HEADS
    p = (tl.program_id(0) // HEADS).to(tl.int64)
    d = tl.arange(0, BD)
    w_D = tl.load(w + head * D + d, mask=d < D, other=0.0).to(tl.float32)
    dw_D = tl.zeros([BD], dtype=tl.float32)
    for tile in range(TILES):
        r = ((p * TILES + tile) * ROWS + tl.arange(0, ROWS)) * HEADS + head
        m = (r < rows)[:, None] & (d < D)[None, :]
        at = r[:, None] * D + d[None, :]
        x_RD = tl.load(x + at, mask=m, other=0.0).to(tl.float32)
        dy_RD = tl.load(dy + at, mask=m, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x_RD * x_RD, axis=1) / D + eps)
        n_RD = x_RD * rstd[:, None]
        if GATE:
            z_RD = tl.load(z + at, mask=m, other=0.0).to(tl.float32)
            s = 1.0 / (1.0 + tl.exp(-z_RD))
            dz_RD = dy_RD * n_RD * w_D[None, :] * s * (1.0 + z_RD * (1.0 - s))
            tl.store(dz + at, dz_RD.to(dz.dtype.element_ty), mask=m)
            dy_RD *= z_RD * s
        dw_D += tl.sum(dy_RD * n_RD, axis=0)
        dn = dy_RD * w_D[None, :]
        dx_RD = (dn - n_RD * (tl.sum(n_RD * dn, axis=1) / D)[:, None]) * rstd[:, None]
        tl.store(dx + at, dx_RD.to(dx.dtype.element_ty), mask=m)
    tl.store(dw + (p * HEADS + head) * D + d, dw_D, mask=d < D)


def _sizes(x: torch.Tensor, w: torch.Tensor) -> tuple[int, int, int]:
    D = x.shape[-1]
    return x.numel() // D, D, w.numel() // D


def _rows(D: int) -> int:
    return max(1, min(ROWS, 4096 // power_of_two(D, 1)))


def _gate_rows(z: torch.Tensor | None, D: int) -> tuple[torch.Tensor | None, int, int]:
    """The gate, its rows of D per token, and the elements between tokens; slices of projections are not copied."""
    if z is None:
        return None, 1, D
    if z.dim() < 3 or z.is_contiguous():
        return z.contiguous(), 1, D
    z, row = token_rows(z)
    return z, z.shape[2:].numel() // D, row


class Upstream(NamedTuple):
    """The gradient of the output."""

    dy: torch.Tensor


def _fake_norm_forward(call: GatedNormCall):
    return torch.empty(call.x.shape, dtype=call.x.dtype, device=call.x.device)


@operator(_fake_norm_forward)
def norm_forward(call: GatedNormCall) -> torch.Tensor:
    """The forward pass of gated_rms_norm."""
    x, w = call.x.contiguous(), call.weight.contiguous()
    rows, D, heads = _sizes(x, w)
    z, z_heads, z_row = _gate_rows(call.z, D)
    y = x.new_empty(x.shape)
    tile = _rows(D)
    launch(
        _norm_forward_kernel, cdiv(rows, tile),
        x, z, w, y, rows, call.eps, HEADS=heads, D=D, BD=power_of_two(D, 1), ROWS=tile, GATE=z is not None,
        Z_HEADS=z_heads, Z_ROW=z_row,
    )  # fmt: skip
    return y


def _fake_norm_backward(upstream: Upstream, call: GatedNormCall):
    x, z, w, _ = call
    dz = x.new_empty(0) if z is None else torch.empty(z.shape, dtype=z.dtype, device=z.device)
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        dz,
        torch.empty(w.shape, dtype=w.dtype, device=w.device),
    )


@operator(_fake_norm_backward)
def norm_backward(upstream: Upstream, call: GatedNormCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, z (empty without a gate) and w."""
    dy, x, w = upstream.dy.contiguous(), call.x.contiguous(), call.weight.contiguous()
    z = None if call.z is None else call.z.contiguous()
    rows, D, heads = _sizes(x, w)
    dx = torch.empty_like(x)
    dz = x.new_empty(0) if z is None else torch.empty_like(z)
    tile = _rows(D)
    programs = cdiv(rows, heads * tile * TILES)
    dw = torch.empty(programs, heads, D, dtype=torch.float32, device=x.device)
    launch(
        _norm_backward_kernel, programs * heads,
        x, z, w, dy, dx, dz, dw, rows, call.eps, HEADS=heads, D=D, BD=power_of_two(D, 1), ROWS=tile,
        TILES=TILES, GATE=z is not None,
    )  # fmt: skip
    return dx, dz, dw.sum(0).view(w.shape).to(w.dtype, copy=True)


_norm = differentiable_call(norm_forward, norm_backward, ("x", "z", "weight"), Upstream)


def gated_rms_norm_triton(call: GatedNormCall) -> torch.Tensor:
    """`deltanet_kernels.gated_rms_norm` in Triton, for checked arguments.

    Raises:
        NotImplementedError: float64.
    """
    if call.x.dtype == torch.float64:
        raise NotImplementedError("dtype torch.float64: the kernels compute in float32")
    return _norm(call)
