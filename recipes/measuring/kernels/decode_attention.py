"""Times attention of one query per sequence to a long cache: `python -m measuring.kernels decode_attention`.

The cache has an eighth more places than tokens, as that of a captured decoding step. Peers: SDPA with the mask of the
places, its query heads grouped so that it reads keys and values once, and SDPA without a mask over the tokens alone,
which PyTorch computes by FlashAttention. Each is first compared with float64.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from deltanet_kernels import decode_attention
from deltanet_kernels.flash_decoding import attention, config
from deltanet_kernels.flash_decoding.calls import DecodeAttentionCall
from deltanet_kernels.flash_decoding.config import DecodeConfig, decode_config
from deltanet_kernels.flash_decoding.reference import torch_decode_attention
from measuring.kernels.harness import (
    Always,
    Benchmark,
    Configuration,
    relative_error,
    several_caches,
    time_steps,
)
from measuring.rows import Row

SHAPES = [
    (B, tokens, *heads)
    for heads in ((32, 8, 128), (9, 3, 64))
    for B, tokens in ((1, 2048), (1, 32768), (16, 2048), (16, 16384))
]
"""Sequences, tokens of each, query and key heads, head size."""
NOTE = "B, tokens, HQ, HK, D; an eighth more places, bfloat16; shares count the keys and values of tokens"
Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Inputs(NamedTuple):
    """Calls with several caches, the true result of the first, and the bytes of the keys and values of all tokens."""

    calls: list[DecodeAttentionCall]
    wanted: Tensor
    size: int


def over_tokens(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """SDPA without a mask: the tokens are the first eight ninths of the places."""
    tokens = k.shape[2] // 9 * 8
    return scaled_dot_product_attention(q, k[:, :, :tokens], v[:, :, :tokens], enable_gqa=True)


IMPLEMENTATIONS: dict[str, Attention] = {
    "deltanet": decode_attention,
    "sdpa, mask": lambda *call: torch_decode_attention(DecodeAttentionCall(*call)),
    "sdpa, no mask": over_tokens,
}


@functools.lru_cache(maxsize=1)
def make(B: int, tokens: int, HQ: int, HK: int, D: int, places: int) -> Inputs:
    """Inputs in bfloat16 of so many tokens in caches with so many places."""
    torch.manual_seed(0)
    q = torch.randn(B, HQ, 1, D, device="cuda", dtype=torch.bfloat16)
    mask = (torch.arange(places, device="cuda") < tokens).expand(B, 1, 1, places).contiguous()

    def call() -> DecodeAttentionCall:
        k, v = (torch.randn(B, HK, places, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return DecodeAttentionCall(q, k, v, mask)

    size = 4 * B * tokens * HK * D
    calls = several_caches(call, size)
    first = calls[0]
    wanted = torch_decode_attention(first._replace(q=q.double(), k=first.k.double(), v=first.v.double()))
    return Inputs(calls, wanted, size)


def attend(run: Attention, inputs: Inputs) -> Row:
    """The figures of an implementation."""
    error = relative_error(run(*inputs.calls[0][:4]), inputs.wanted)
    return time_steps(lambda call: run(*call[:4]), inputs.calls, error, inputs.size)


def measure(labels: Row, options: argparse.Namespace) -> Row:
    """The figures of the row with these labels."""
    return attend(IMPLEMENTATIONS[labels["impl"]], make(*labels["shape"], labels["shape"][1] // 8 * 9))


def rows(peers: bool) -> Iterator[Row]:
    """Labels of the rows; PyTorch, which is always there, stands beside ours in any case."""
    for shape, impl in itertools.product(SHAPES, IMPLEMENTATIONS):
        yield {"shape": list(shape), "impl": impl}


def configurations(labels: Row) -> Iterator[Configuration]:
    """Other sizes of tiles, pipeline stages, warps and numbers of programs."""
    own = decode_config(labels["shape"][4], torch.bfloat16)
    for programs, tile, stages, warps in itertools.product((2, 4, 8), (32, 64, 128), (2, 3, 4), (4, 8)):
        sizes = Always(DecodeConfig(tile, own.D, warps, stages))
        yield {(config, "PROGRAMS"): programs, (attention, "decode_config"): sizes}


BENCHMARK = Benchmark(rows, measure, {"shape": NOTE}, True, configurations)
