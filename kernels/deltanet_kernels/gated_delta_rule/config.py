"""Pinned block sizes of the kernels: a table for sm_90, and defaults for every other chip. Nothing is searched for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from deltanet_kernels.common.registration import cached
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


@dataclass(frozen=True)
class ChunkConfig:
    """Tokens per chunk; slices of V, warps, pipeline stages and registers per thread of the chunk kernels.

    A state kernel with 64 columns per group of four warps reads its computed tiles from registers (states.py). Three
    stages hide the memory latency at one program per multiprocessor; two stages do not (the loads are issued at the
    end of one chunk and awaited at the start of the next). The loops over V of the input
    gradients stay unpipelined: with two stages there Triton 3.6 on an H200 gave gradients that changed from run to
    run. Eight warps on 64 rows would do the same products twice.
    """

    C: int = 64
    score_warps: int = 4
    solve_warps: int = 1
    state_BV: int = 64
    state_warps: int = 4
    state_stages: int = 3
    output_BV: int = 64
    output_warps: int = 4
    grad_BV: int = 64
    grad_warps: int = 4
    grad_stages: int = 3
    pair_BV: int = 64
    pair_warps: int = 4
    pair_registers: int | None = None  # a limit, so that more programs fit on a multiprocessor
    input_BV: int = 64
    input_warps: int = 4
    joint_size: int = 0  # if K and V fill tiles of this width, one kernel computes all gradients (gradients_64.py)
    hopper_gradients: bool = False  # the Gluon kernel of the gradients where it fits (select.py)
    hopper_solve: bool = False  # use hopper/solve.py where it fits
    input_registers: int | None = None  # 255 is the maximum; without a limit ptxas sometimes chooses 32, and spills


@cached
def chunk_config(K: int, V: int, dtype: torch.dtype, capability: tuple[int, int]) -> ChunkConfig:
    """The configuration for head sizes K, V in `dtype` on a chip of this compute capability.

    sm_90 has its own table; elsewhere the state kernels are not pipelined and all fits into 99 KiB of shared
    memory (102 KiB for float32 heads over 128).
    """
    BK = tile_width(K, dtype)
    BV = tile_width(V, dtype)
    config = ChunkConfig()
    if dtype == torch.float32:
        # Twice the bytes in shared memory, and products without wgmma.
        narrow = 16 if BK > 128 else 32
        config = replace(
            config, C=32, state_BV=narrow, output_BV=32, grad_BV=narrow, pair_BV=narrow, pair_registers=255,
            input_BV=narrow, input_registers=255, state_stages=2, grad_stages=2,
        )  # fmt: skip
    elif BK > 128:
        config = replace(config, pair_BV=32, input_BV=32, state_stages=1, grad_stages=1)
    elif BK > 64 and BV > 64:
        config = replace(
            config, state_BV=128, state_warps=8, grad_BV=128, grad_warps=8, output_BV=128, pair_registers=255,
            pair_BV=128 if dtype == torch.bfloat16 else 64,
        )  # fmt: skip
    if capability[0] != 9:
        narrow = min(config.state_BV, 32 if BK > 64 else 64)
        config = replace(
            config, state_BV=narrow, state_warps=4, state_stages=1, grad_BV=narrow, grad_warps=4, grad_stages=1,
            input_BV=min(config.input_BV, 32 if BK <= 128 else 16), input_registers=255,
            pair_BV=min(config.pair_BV, 64),
        )  # fmt: skip
    elif dtype == torch.bfloat16:
        config = replace(config, joint_size=64, hopper_gradients=K == V == 128, hopper_solve=K in (64, 128))
    return replace(
        config,
        state_BV=min(config.state_BV, BV),
        output_BV=min(config.output_BV, BV),
        grad_BV=min(config.grad_BV, BV),
        pair_BV=min(config.pair_BV, BV),
        input_BV=min(config.input_BV, BV),
    )


def slices(BV: int, warps: int, V: int, states: int, processors: int) -> tuple[int, int]:
    """Slice of V and warps of a state kernel over `states` states: narrower slices where wide ones leave the chip idle.

    Segments do not count: cut or not, the sequences of few states are processed in narrow slices (segments.py).
    """
    if BV > 64 and 2 * states * cdiv(V, BV) <= processors:
        return BV // 2, warps // 2
    return BV, warps


def summed_stages(config: ChunkConfig, BK: int, BV: int, element_size: int) -> int:
    """Pipeline stages of the backward state kernel where it reads the float32 sums of query_sums.py.

    A stage holds K and T of a chunk and one tile of each sum; together they stay within 200 KiB of shared memory.
    """
    stage = element_size * config.C * (BK + config.C) + 4 * BV * (BK + config.C)
    return max(1, min(config.grad_stages, 200 * 1024 // stage))


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


def step_warps(elements: int) -> int:
    """Warps of the step of several tokens with `elements` of state per program; more make the compiler repeat loads."""
    return max(1, min(4, elements // 2048))
