"""Sizes of tiles and slices, precision of products, and what the kernels take; chips.py has the tables per chip."""

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


def step_slices(K: int, V: int, programs: int, processors: int) -> tuple[int, int, bool]:
    """Columns per slice of the one-token step, warps per program, and whether the next slice is loaded early.

    Slices have rows of 256 bytes of float32; narrower ones cost bandwidth. There is one thread per channel of q and k:
    with more threads the sums over K, which cross the warps, take longer than the loads. Loading early takes the
    registers of a third program per multiprocessor, so it is used only where there is none.
    """
    return min(power_of_two(V, 1), 64), max(1, power_of_two(K, 1) // 32), programs <= 2 * processors


def late_slices(V: int, state: torch.dtype) -> tuple[int, int, bool, int]:
    """The same for a step with late writes to a state of this dtype, and the neighbouring columns of a thread.

    The compiler alone makes a thread load 16 bytes. Of 8 bits these are 16 columns, whose sums over K take four times
    the shuffles between threads and a third more registers than four columns.
    """
    width, columns = {torch.float32: (32, 2), torch.int8: (64, 4)}.get(state, (32, 4))
    return min(power_of_two(V, 1), width), 4, True, columns


def fold_rows(BK: int, BV: int, warps: int) -> int:
    """Rows of the state that a program folds late writes into at a time: 32 numbers per thread, at least 16 rows."""
    return max(16, min(BK, 1024 * warps // BV))


def step_warps(elements: int) -> int:
    """Warps of the step of several tokens with `elements` of state per program; more make the compiler repeat loads."""
    return max(1, min(4, elements // 2048))
