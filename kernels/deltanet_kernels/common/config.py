"""Sizes of tiles and slices, precision of products, and what the kernels take."""

from __future__ import annotations

import torch

from deltanet_kernels.common.sizes import cdiv, power_of_two


def tile_width(size: int, dtype: torch.dtype) -> int:
    """The width of a tile that holds a head of this size: a power of two, in float16 at least 64.

    Narrower float16 tiles have another layout in shared memory than [C, C] ones. Where two tiles follow each other
    at one address in two layouts, ptxas 12.8 (Triton 3.6) computes the addresses of all products but the first of a
    sum from the wrong register (ptxas 12.9 does not): on an H200 dk came out wrong at K = 16, V = 40. bfloat16 tiles,
    which are placed in another order, and the slices of 32 columns for K over 128 do not follow each other there.
    """
    return power_of_two(size, 64 if dtype == torch.float16 else 16)


MAX_HEAD_SIZE = 256
MIN_HALF_SIZE = 16  # smaller heads are computed in float32: too few numbers for their rounding errors to average out


def check_supported(dtype: torch.dtype, K: int, V: int) -> None:
    """Raise NotImplementedError, with the reason, for what no Triton kernel here computes."""
    if max(K, V) > MAX_HEAD_SIZE:
        raise NotImplementedError(f"head sizes {K} and {V}: the kernels go up to {MAX_HEAD_SIZE}")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotImplementedError(f"dtype {dtype}: the kernels take float32, bfloat16 and float16")


def slices(BV: int, warps: int, V: int, states: int, processors: int) -> tuple[int, int]:
    """Slice of V and warps of a state kernel over `states` states: narrower slices where wide ones leave the chip idle.

    Segments do not count: cut or not, the sequences of few states are processed in narrow slices (segments.py).
    """
    if BV > 64 and 2 * states * cdiv(V, BV) <= processors:
        return BV // 2, warps // 2
    return BV, warps


def product_precision(precision: str, dtype: torch.dtype) -> str:
    """Triton's input_precision of matrix products; "auto": as set by torch.set_float32_matmul_precision."""
    if precision != "auto":
        return precision
    if dtype != torch.float32:
        return "tf32"  # 16-bit products are exact; this is for the merges of T
    return {"highest": "ieee", "high": "tf32x3", "medium": "tf32"}[torch.get_float32_matmul_precision()]


def recurrent_config(K: int, V: int, heads: int) -> tuple[int, int]:
    """Slice of V and warps of the recurrent kernel; `heads` states in all."""
    BK, BV = power_of_two(K, 1), power_of_two(V, 1)
    elements = 2048 if heads < 1024 else 4096  # few states: more programs; many: longer rows
    return max(1, min(BV, elements // BK)), 1
