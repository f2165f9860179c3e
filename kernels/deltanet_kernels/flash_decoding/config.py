"""Tile sizes of the attention of one query per sequence, and the spans into which its places are cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltanet_kernels.common.config import tile_width
from deltanet_kernels.common.registration import cached
from deltanet_kernels.common.sizes import cdiv

LEAST_SPAN = 256  # places: a shorter span ends before its loads are under way
PROGRAMS = 4  # per multiprocessor: two or three run at a time, and the next ones take the place of the first that end
MAX_GROUP = 32  # query heads per key head, whose sums a program holds
MASK_BLOCK = 1024  # places whose mask is read at a time


@dataclass(frozen=True)
class DecodeConfig:
    """Places per tile, channels of a tile, warps and pipeline stages."""

    N: int
    D: int
    warps: int
    stages: int


@cached
def decode_config(D: int, dtype: torch.dtype) -> DecodeConfig:
    """Sizes for a head size and dtype. Tiles of keys and values are 16 KiB each, those of wide float16 heads 32 KiB."""
    BD = tile_width(D, dtype)
    if dtype == torch.float32:
        return DecodeConfig(max(16, min(64, 4096 // BD)), BD, 4, 2)
    least = 64 if dtype == torch.float16 else 16  # see tile_width
    N = max(least, min(128, 8192 // BD))
    return DecodeConfig(N, BD, 4, 3 if N * BD <= 8192 else 2)


def cut_places(S: int, pairs: int, processors: int, tile: int) -> tuple[int, int]:
    """Places per span, a multiple of `tile`, and the number of spans, for `pairs` of a sequence and a key head."""
    wanted = cdiv(PROGRAMS * processors, pairs)
    span = cdiv(max(LEAST_SPAN, cdiv(S, wanted)), tile) * tile
    return span, cdiv(S, span)
