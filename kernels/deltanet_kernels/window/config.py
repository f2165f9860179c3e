"""Tile sizes of the attention over window and sinks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltanet_kernels.common.config import tile_width
from deltanet_kernels.common.registration import cached
from deltanet_kernels.common.sizes import power_of_two


@dataclass(frozen=True)
class WindowConfig:
    """Queries and keys per tile, sinks per tile, channels of a tile, warps and pipeline stages, and `key_heads`.

    Narrow tiles waste less at the window's ends: a tile of M queries loads window + M - 1 keys.
    """

    M: int
    N: int
    S: int
    D: int
    warps: int
    stages: int
    heads: int = 1


@cached
def window_config(kernel: str, D: int, sinks: int, dtype: torch.dtype) -> WindowConfig:
    """Sizes for a head size, number of sinks and dtype.

    `kernel` is "forward", "gradients_q" or "gradients_k"; a program of the last keeps N keys, one of the others M
    queries. Float32 tiles are multiplied in registers, and so are smaller.
    """
    BD = tile_width(D, dtype)
    if dtype == torch.float32:
        M, N, warps = (32, 32, 4) if BD <= 64 else (32, 16, 8) if BD == 128 else (16, 16, 8)
        return WindowConfig(M, N, 16, BD, warps, 1)
    if BD <= 64:
        M, N, stages = 64, 64, {"forward": 2, "gradients_q": 3, "gradients_k": 1}[kernel]
    elif BD == 128:
        M, N, stages = {"forward": (64, 64, 2), "gradients_q": (64, 32, 2), "gradients_k": (32, 64, 2)}[kernel]
    else:
        M, N, stages = (64 if kernel == "forward" else 32), 32, 1
    least = 64 if dtype == torch.float16 else 16  # see tile_width
    return WindowConfig(M, N, min(N, power_of_two(max(sinks, 1), least)), BD, 4, stages)


def key_heads(group: int, programs: int, processors: int) -> int:
    """Query heads per program of the gradients of keys, of `group` that share keys; `programs` with all of them.

    Apart they fill the chip where programs are few, and the longest ends sooner; together they read a key once.
    """
    return 1 if programs <= 2 * processors else group
