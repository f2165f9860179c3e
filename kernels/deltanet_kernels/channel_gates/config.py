"""Sizes that the kernels of the rule with a decay per channel are launched with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltanet_kernels.common.config import tile_width
from deltanet_kernels.common.registration import cached

MAX_KEY_SIZE, MAX_VALUE_SIZE = 128, 256


@dataclass(frozen=True)
class ChannelConfig:
    """Tokens per chunk, tile widths of K and V, slices, stages, warps, and how far factors may exceed 1."""

    C: int
    KP: int  # K and V padded to tiles
    VP: int
    score_BK: int
    grad_BK: int
    BV: int
    stages: int
    grad_stages: int
    limit: float  # a factor e^x with x up to this is exact enough in the dtype of the products (decay.py)
    score_warps: int = 4
    score_registers: int | None = None  # per thread, at most
    grad_warps: int = 4  # of gradients_inputs.py


def check_supported(dtype: torch.dtype, K: int, V: int) -> None:
    """Raise NotImplementedError, with the reason, for what no Triton kernel here computes."""
    if K > MAX_KEY_SIZE or V > MAX_VALUE_SIZE:
        raise NotImplementedError(
            f"head sizes {K} and {V}: the kernels go up to {MAX_KEY_SIZE} for keys and {MAX_VALUE_SIZE} for values"
        )
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotImplementedError(f"dtype {dtype}: the kernels take float32, bfloat16 and float16")


@cached
def channel_config(K: int, V: int, dtype: torch.dtype, capability: tuple[int, int]) -> ChannelConfig:
    """The configuration for head sizes K, V in `dtype` on a chip of this compute capability.

    128 registers per thread let two programs of 8 warps share a multiprocessor; with keys of 128 channels they would
    spill too much, and narrow slices with 4 warps are faster where two products serve a chunk (decay.py).

    float16 has no range for factors above 1. In float32 the exponent's rounding grows with its size. In 16 bits no tile
    is narrower than 64: beside wider ones, tiles of 16 columns gave wrong outputs on an H200 with Triton 3.6 (bfloat16,
    K = 40, V = 16; see `common.config.tile_width` for float16).
    """
    KP, VP = tile_width(K, dtype), tile_width(V, dtype)
    if dtype == torch.float32:
        return ChannelConfig(32, KP, VP, 32 if KP > 16 else 16, 32 if KP > 16 else 16, min(VP, 32), 1, 1, 10.0)
    KP, VP = max(KP, 64), max(VP, 64)
    pipelined = capability[0] == 9
    return ChannelConfig(
        C=64,
        KP=KP,
        VP=VP,
        score_BK=64 if KP <= 64 else 32,
        grad_BK=min(KP, 64 if dtype == torch.float16 else 32),
        BV=min(VP, 64),
        stages=3 if pipelined else 1,
        grad_stages=(3 if KP <= 64 else 2) if pipelined else 1,
        limit=0.0 if dtype == torch.float16 else 75.0,
        score_warps=8 if KP <= 64 else 4,
        score_registers=128 if KP <= 64 else None,
    )
