"""Pinned block sizes of the kernels: a table for sm_90, and a default that fits every other chip."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. (Triton's own version costs ten times as much on the host.)"""
    return -(-a // b)


def power_of_two(n: int, least: int = 16) -> int:
    """The next power of two, at least `least`: a tile's size for n elements."""
    return max(least, 1 << (n - 1).bit_length())


@dataclass(frozen=True)
class ChunkConfig:
    """Tokens a chunk; slices of V, warps and pipeline stages of the kernels of chunk_*.py.

    The loops over V of the input gradients stay unpipelined (one stage), and K = V = 128 keeps the backward state pass
    in slices of 32: with two stages there and slices of 64 in both, Triton 3.6 on an H200 gave gradients that changed
    from run to run; which of the two it was has not been separated.
    """

    C: int = 64
    prepare_warps: int = 1
    state_BV: int = 64
    state_warps: int = 4
    state_stages: int = 3
    output_BV: int = 64
    output_warps: int = 4
    grad_BV: int = 64
    grad_warps: int = 4
    grad_stages: int = 3
    query_BV: int = 64
    query_warps: int = 4
    query_stages: int = 1
    key_BV: int = 64
    key_warps: int = 8
    key_stages: int = 1
    query_registers: int | None = None  # a limit per thread, so that more programs fit on a multiprocessor
    key_registers: int | None = None


@functools.cache
def chunk_config(K: int, V: int, dtype: torch.dtype, capability: tuple[int, int]) -> ChunkConfig:
    """The configuration for head sizes K, V in `dtype` on a chip of this compute capability."""
    BK = power_of_two(K)
    BV = power_of_two(V)
    config = ChunkConfig()
    if dtype == torch.float32:
        # Twice the bytes in shared memory, and products without wgmma.
        narrow = 16 if BK > 128 else 32
        config = replace(config, C=32, state_BV=narrow, output_BV=32, grad_BV=narrow, query_BV=narrow, key_BV=narrow)
    elif BK > 128:
        config = replace(
            config,
            state_BV=32,
            grad_BV=16,
            query_BV=32,
            key_BV=32,
            query_warps=8,
            key_warps=8,
            state_stages=2,
            grad_stages=2,
        )
    elif BK > 64:
        config = replace(config, output_BV=128, state_stages=2, grad_BV=32, grad_stages=2, key_BV=128, query_BV=128)
    return replace(
        config,
        state_BV=min(config.state_BV, BV),
        output_BV=min(config.output_BV, BV),
        grad_BV=min(config.grad_BV, BV),
        query_BV=min(config.query_BV, BV),
        key_BV=min(config.key_BV, BV),
    )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 elsewhere (the interpreter)."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; (0, 0) elsewhere (the interpreter)."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def product_precision(precision: str, dtype: torch.dtype) -> str:
    """Triton's input_precision of matrix products; "auto": what torch.set_float32_matmul_precision asks for."""
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
