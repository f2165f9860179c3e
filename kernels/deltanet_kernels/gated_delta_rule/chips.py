"""Which kernel computes a stage of a call, and in which sizes: two tables, of which the first row that fits counts.

docs/kernel-code.md shows both (`tools/readme_tables.py` writes them). A chip is the major number of its compute
capability: 9 is Hopper (H100, H200).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch

from deltanet_kernels.common.config import MAX_HEAD_SIZE, tile_width
from deltanet_kernels.common.registration import cached

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EVERY_SIZE = range(1, MAX_HEAD_SIZE + 1)


class Kernel(NamedTuple):
    """A kernel that computes a stage, and the calls that it serves."""

    stage: str
    file: str
    chip: int | None = None  # None: every one that Triton supports
    dtypes: Sequence[torch.dtype] = (BF16, FP16, FP32)
    K: Sequence[int] = EVERY_SIZE
    V: Sequence[int] = EVERY_SIZE
    heads: str = "any"  # or "HQ = H", or "HQ = H = HV": heads of q (HQ), of k (H), of v and the states (HV)
    gluon: bool = False
    """Written in Gluon: requires Triton 3.6 to 3.9, erase="decayed", rows of q, k and dO that begin at multiples of 16
    bytes, and T a multiple of C, not packed; else the next row serves the whole call."""


SCORES = "scores, row factors, inverse"
STATES = "states, outputs"
STATES_BACKWARD = "gradients of the states"
GRADIENTS = "gradients within a chunk"

HOPPER_SOLVE = Kernel(SCORES, "hopper/solve.py", 9, (BF16,), (64, 128), heads="HQ = H", gluon=True)
HOPPER_GRADIENTS = Kernel(
    GRADIENTS, "hopper/gradients_128.py", 9, (BF16,), (128,), (128,), heads="HQ = H", gluon=True
)  # fmt: skip
GRADIENTS_64 = Kernel(GRADIENTS, "gradients_64.py", 9, (BF16,), range(33, 65), range(33, 65), heads="HQ = H = HV")

KERNELS = (
    HOPPER_SOLVE,
    Kernel(SCORES, "scores.py, solve.py"),
    Kernel(STATES, "states.py"),
    Kernel(STATES_BACKWARD, "query_sums.py (if HQ > HV), states_backward.py"),
    HOPPER_GRADIENTS,
    GRADIENTS_64,
    Kernel(GRADIENTS, "gradients_pairs.py, gradients_inputs.py"),
)


@cached
def kernels(
    K: int, V: int, dtype: torch.dtype, capability: tuple[int, int], HQ: int, H: int, HV: int
) -> tuple[Kernel, ...]:
    """The rows of `KERNELS` that serve such calls; a Gluon kernel also depends on what `LaunchPlan.serving` checks."""
    heads = {"any": True, "HQ = H": HQ == H, "HQ = H = HV": HQ == H == HV}
    return tuple(
        row for row in KERNELS
        if row.chip in (None, capability[0]) and dtype in row.dtypes and K in row.K and V in row.V and heads[row.heads]
    )  # fmt: skip


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
    input_registers: int | None = None  # 255 is the maximum; without a limit ptxas sometimes chooses 32, and spills


SLICES = tuple(field.name for field in fields(ChunkConfig) if field.name.endswith("_BV"))


class Sizes(NamedTuple):
    """The configuration of a chip for heads of a dtype, by the widths of the tiles that hold K and V."""

    chip: int | None
    dtypes: Sequence[torch.dtype]
    BK: Sequence[int]
    BV: Sequence[int]
    config: ChunkConfig


UP_TO_64, UP_TO_128, UP_TO_256, OVER_64 = (16, 32, 64), (16, 32, 64, 128), (16, 32, 64, 128, 256), (128, 256)
HALF = (BF16, FP16)
# Twice the bytes in shared memory, and products without wgmma.
SINGLE = ChunkConfig(
    C=32, state_BV=32, state_stages=2, output_BV=32, grad_BV=32, grad_stages=2, pair_BV=32, pair_registers=255,
    input_BV=32, input_registers=255,
)  # fmt: skip
NARROW_SINGLE = replace(SINGLE, state_BV=16, grad_BV=16, pair_BV=16, input_BV=16)
WIDE = ChunkConfig(
    state_BV=128, state_warps=8, output_BV=128, grad_BV=128, grad_warps=8, pair_BV=128, pair_registers=255
)  # fmt: skip
# Without pipelined state kernels all fits into 99 KiB of shared memory (102 KiB for float32 heads over 128).
OTHER_CHIP = ChunkConfig(state_stages=1, grad_stages=1, input_BV=32, input_registers=255)

SIZES = (
    Sizes(9, (FP32,), UP_TO_128, UP_TO_256, SINGLE),
    Sizes(9, (FP32,), (256,), UP_TO_256, NARROW_SINGLE),
    Sizes(9, HALF, (256,), UP_TO_256, ChunkConfig(state_stages=1, grad_stages=1, pair_BV=32, input_BV=32)),
    Sizes(9, (BF16,), (128,), OVER_64, WIDE),
    Sizes(9, (FP16,), (128,), OVER_64, replace(WIDE, pair_BV=64)),
    Sizes(9, HALF, UP_TO_128, UP_TO_256, ChunkConfig()),
    Sizes(None, (FP32,), UP_TO_128, UP_TO_256, replace(SINGLE, state_stages=1, grad_stages=1)),
    Sizes(None, (FP32,), (256,), UP_TO_256, replace(NARROW_SINGLE, state_stages=1, grad_stages=1)),
    Sizes(None, HALF, (256,), UP_TO_256, replace(OTHER_CHIP, state_BV=32, grad_BV=32, pair_BV=32, input_BV=16)),
    Sizes(None, HALF, (128,), OVER_64, replace(OTHER_CHIP, state_BV=32, output_BV=128, grad_BV=32, pair_registers=255)),
    Sizes(None, HALF, (128,), UP_TO_64, replace(OTHER_CHIP, state_BV=32, grad_BV=32)),
    Sizes(None, HALF, UP_TO_64, UP_TO_256, OTHER_CHIP),
)


@cached
def chunk_config(K: int, V: int, dtype: torch.dtype, capability: tuple[int, int]) -> ChunkConfig:
    """The configuration for head sizes K, V in `dtype` on a chip of this compute capability; no slice exceeds V."""
    BK, BV = tile_width(K, dtype), tile_width(V, dtype)
    config = next(
        row.config for row in SIZES
        if row.chip in (None, capability[0]) and dtype in row.dtypes and BK in row.BK and BV in row.BV
    )  # fmt: skip
    return replace(config, **{name: min(getattr(config, name), BV) for name in SLICES})


def summed_stages(config: ChunkConfig, BK: int, BV: int, element_size: int) -> int:
    """Pipeline stages of the backward state kernel where it reads the float32 sums of query_sums.py.

    A stage holds K and T of a chunk and one tile of each sum; together they stay within 200 KiB of shared memory.
    """
    stage = element_size * config.C * (BK + config.C) + 4 * BV * (BK + config.C)
    return max(1, min(config.grad_stages, 200 * 1024 // stage))
