"""Times attention to a packed cache: `python -m measuring.kernels packed_attention`.

4 bits, with and without a key order, and 8 bits beside `decode_attention` on the same tokens in 16 bits. The layers
are a softmax layer of an 8B model (32 query heads, 8 key heads, 128 channels), of the teacher as of a hybrid that
keeps it, and of a small model (9, 3, 64). Caches have places for an eighth more tokens; the last rows are windows of
256 tokens, a ring of 8 groups. Each form is first compared with float64 on the numbers that it holds. A packed row
also has the time of a whole step (rotary embedding, appending a token, attention) and of packing a prompt.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from deltanet_kernels import PackedKeyValues, decode_attention, pack_groups, packed_attention, packed_step_
from deltanet_kernels.packed_cache import launches
from deltanet_kernels.packed_cache.calls import PackedAttentionCall
from deltanet_kernels.packed_cache.layout import GROUP, SINKS, token_tensors
from deltanet_kernels.packed_cache.reference import torch_packed_attention
from measuring.kernels import decode_attention as in_16_bits
from measuring.kernels.harness import (
    Always,
    Benchmark,
    Configuration,
    relative_error,
    several_caches,
    time_steps,
)
from measuring.kernels.timing import graph_us, median_ms
from measuring.rows import Row

WINDOW = 256
SHAPES = [
    (B, tokens, *heads)
    for heads in ((32, 8, 128), (9, 3, 64))
    for B, tokens in ((1, 2048), (1, 32768), (16, 2048), (16, 16384), (16, WINDOW))
]
"""Sequences, tokens of each, query and key heads, head size."""


def packed(
    B: int, tokens: int, HQ: int, HK: int, D: int, bits: int, key_order: Tensor | None
) -> tuple[Tensor, list[PackedKeyValues], float]:
    """Queries, several caches, and the bytes of the keys and values of all tokens, scales included.

    Sequences of a window's length have read twice as many tokens.
    """
    torch.manual_seed(0)
    ring = tokens == WINDOW
    places = tokens if ring else tokens // 8 * 9 // GROUP * GROUP
    q = torch.randn(B, HQ, 1, D, device="cuda", dtype=torch.bfloat16)

    def cache() -> PackedKeyValues:
        k, v = (torch.randn(B, HK, places, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        own = token_tensors(*(x[:, :, : SINKS + GROUP] for x in (k, v)))
        lengths = torch.full((B,), 2 * tokens - 8 if ring else tokens - 8, dtype=torch.int32, device="cuda")
        return PackedKeyValues(*pack_groups(k, v, bits, key_order), *own, lengths, key_order)  # type: ignore[call-arg]

    size = 2 * B * tokens * HK * D * (bits + 0.5) / 8  # 16 bits of scale and lowest number for 32 numbers
    return q, several_caches(cache, size), size


def measure(labels: Row, options: argparse.Namespace) -> Row:
    """The figures of the row with these labels."""
    (B, tokens, HQ, HK, D), bits = labels["shape"], labels["bits"]
    if bits == 16:
        places, kept = (tokens + SINKS, tokens + SINKS) if tokens == WINDOW else (tokens // 8 * 9, tokens)
        inputs = in_16_bits.make(B, kept, HQ, HK, D, places)
        return in_16_bits.attend(decode_attention, inputs._replace(size=4 * B * tokens * HK * D))
    window = WINDOW if tokens == WINDOW else None
    order = torch.rand(HK, D, device="cuda").argsort() if labels["key_order"] else None
    key_order = None if order is None else torch.stack([order, order.argsort()], dim=1)
    q, caches, size = packed(B, tokens, HQ, HK, D, bits, key_order)
    wanted, _ = torch_packed_attention(PackedAttentionCall(q.double(), caches[0], window, SINKS))
    error = relative_error(packed_attention(q, caches[0], window, SINKS)[0], wanted)
    row = time_steps(lambda cache: packed_attention(q, cache, window, SINKS), caches, error, size)
    k = torch.randn(B, 1, HK, D, device="cuda", dtype=torch.bfloat16)
    cos, sin, turns = k[:1, :, 0], k[:1, :, -1], itertools.cycle(caches)

    def step() -> object:
        return packed_step_(q.transpose(1, 2), k, k, next(turns), window, SINKS, cos=cos, sin=sin)

    row["step_us"] = round(graph_us(step, max(4, len(caches))), 3)
    prompt = torch.randn(1, tokens, HK, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    row["pack_prompt_us"] = round(1e3 * median_ms(lambda: pack_groups(prompt, prompt, bits, key_order)), 3)
    return row


def rows(peers: bool) -> Iterator[Row]:
    """Labels of the rows."""
    for shape, (bits, ordered) in itertools.product(SHAPES, ((16, False), (8, False), (4, False), (4, True))):
        yield {"shape": list(shape), "bits": bits, "key_order": ordered}


def configurations(labels: Row) -> Iterator[Configuration]:
    """Other warps, pipeline stages and spans, of packed caches."""
    for warps, stages, span in itertools.product((1, 2, 4), (2, 3), (1, 2, 4, 6, 9, 12, 18)):
        yield {(launches, "packed_config"): Always((warps, stages)), (launches, "span_of"): Always(span)}


BENCHMARK = Benchmark(rows, measure, {"shape": in_16_bits.NOTE}, True, configurations)
