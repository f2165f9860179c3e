"""Times attention to a packed cache: `python -m measuring.kernels.packed_attention`.

4 and 8 bits beside `decode_attention` on the same tokens in 16 bits. The layers are a softmax layer of an 8B model (32
query heads, 8 key heads, 128 channels), of the teacher as of a hybrid that keeps it, and of a small model (9, 3, 64).
Caches have places for an eighth more tokens; the last rows are windows of 256 tokens, a ring of 8 groups. Each form is
first compared with float64 on the numbers that it holds. All run in a CUDA graph, on several caches in turn, so that
none stays in the L2 cache. A packed row also has the time of appending a token.

    python -m measuring.kernels.packed_attention --sweep

times 4 bits with other tile sizes, warps, pipeline stages and numbers of programs, and writes no file.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltanet_kernels import PackedKeyValues, decode_attention, pack_groups, packed_append_, packed_attention
from deltanet_kernels.flash_decoding.calls import DecodeAttentionCall
from deltanet_kernels.flash_decoding.reference import torch_decode_attention
from deltanet_kernels.packed_cache import launches
from deltanet_kernels.packed_cache.calls import PackedAttentionCall
from deltanet_kernels.packed_cache.launches import PackedConfig, packed_config
from deltanet_kernels.packed_cache.layout import GROUP, SINKS
from deltanet_kernels.packed_cache.reference import torch_packed_attention
from measuring.kernels.table import one_line
from measuring.kernels.timing import copy_bandwidth, graph_us, median_ms, write


class Shape(NamedTuple):
    """Sequences, tokens of each, query and key heads, head size."""

    B: int
    tokens: int
    HQ: int
    HK: int
    D: int

    def bytes(self, bits: int) -> float:
        """Of the keys and values of all tokens, with 32 bits of scale and lowest number for 32 numbers."""
        numbers = 2 * self.B * self.tokens * self.HK * self.D
        return numbers * (2 if bits == 16 else (bits + 1) / 8)


SHAPES = [
    Shape(B, tokens, *heads)
    for heads in ((32, 8, 128), (9, 3, 64))
    for B, tokens in ((1, 2048), (1, 32768), (16, 2048), (16, 16384), (16, 256))
]
Run = Callable[[], Any]


def packed(shape: Shape, bits: int) -> tuple[Tensor, list[PackedKeyValues]]:
    """Queries, and several caches; sequences of a window's length have read twice as many tokens."""
    B, tokens, HQ, HK, D = shape
    ring = tokens == 256
    groups = tokens // GROUP if ring else tokens // 8 * 9 // GROUP
    q = torch.randn(B, HQ, 1, D, device="cuda", dtype=torch.bfloat16)
    caches = []
    for _ in range(max(1, min(64, int(2**28 // shape.bytes(bits))))):
        k, v = (torch.randn(B, HK, groups * GROUP, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        keys, values = (x[:, :, : SINKS + GROUP].clone() for x in (k, v))
        lengths = torch.full((B,), 2 * tokens - 8 if ring else tokens - 8, dtype=torch.int32, device="cuda")
        a, b, c, d = pack_groups(k, v, bits)
        caches.append(PackedKeyValues(a, b, c, d, keys, values, lengths))
    return q, caches


def measure(shape: Shape, bits: int, bandwidth: float) -> dict[str, Any]:
    """Microseconds of the attention, and of packing a prompt and appending a token."""
    torch.manual_seed(0)
    window = shape.tokens if shape.tokens == 256 else None
    q, caches = packed(shape, bits)
    wide = caches[0]._replace(keys=caches[0].keys.double(), values=caches[0].values.double())
    wanted, _ = torch_packed_attention(PackedAttentionCall(q.double(), wide, window, 4))
    turns = itertools.cycle(caches)
    run = functools.partial(_next, q, turns, window)
    found = _timed(run, run()[0], wanted, len(caches), shape.bytes(bits), bandwidth)
    k = torch.randn(shape.B, shape.HK, 1, shape.D, device="cuda", dtype=torch.bfloat16)
    found["append_us"] = round(graph_us(lambda: packed_append_(k, k, caches[0]), 20, 5), 3)
    prompt = torch.randn(1, shape.tokens, shape.HK, shape.D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    found["pack_prompt_us"] = round(1e3 * median_ms(lambda: pack_groups(prompt, prompt, bits)), 3)
    return found


def sixteen(shape: Shape, bandwidth: float) -> dict[str, Any]:
    torch.manual_seed(0)
    B, tokens, HQ, HK, D = shape
    places = tokens + 4 if tokens == 256 else tokens // 8 * 9
    q = torch.randn(B, HQ, 1, D, device="cuda", dtype=torch.bfloat16)
    mask = (torch.arange(places, device="cuda") < max(tokens, places * (tokens == 256))).expand(B, 1, 1, places)
    calls = []
    for _ in range(max(1, min(64, int(2**28 // shape.bytes(16))))):
        k, v = (torch.randn(B, HK, places, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        calls.append(DecodeAttentionCall(q, k, v, mask.contiguous()))
    turns = itertools.cycle(calls)
    run: Run = lambda: decode_attention(*next(turns))  # noqa: E731
    first = calls[0]
    wanted = torch_decode_attention(first._replace(q=q.double(), k=first.k.double(), v=first.v.double()))
    return _timed(run, run(), wanted, len(calls), shape.bytes(16), bandwidth)


def _timed(run: Run, found: Tensor, wanted: Tensor, caches: int, size: float, bandwidth: float) -> dict[str, Any]:
    row: dict[str, Any] = {"rel_error": ((found.double() - wanted).norm() / wanted.norm()).item()}
    if row["rel_error"] < 1e-2:
        row["us"] = round(graph_us(run, max(4, caches)), 3)
        row["share_of_copy_bandwidth"] = round(size / (row["us"] * 1e-6) / bandwidth, 3)
    return row


def sweep(bandwidth: float) -> None:
    """Print the times of other configurations in 4 bits, the fastest first."""
    pinned = launches.PROGRAMS
    for shape in SHAPES:
        torch.manual_seed(0)
        window = shape.tokens if shape.tokens == 256 else None
        q, caches = packed(shape, 4)
        found: list[tuple[float, str]] = []
        for programs, groups, warps, stages in itertools.product((2, 4, 8), (1, 2, 4), (2, 4, 8), (1, 2, 3)):
            sizes, turns = PackedConfig(groups, warps, stages), itertools.cycle(caches)
            launches.packed_config = functools.partial(_constant, sizes)
            launches.PROGRAMS = programs
            try:
                us = graph_us(functools.partial(_next, q, turns, window), max(4, len(caches)))
                found.append((us, f"{us:.1f} us: {programs} programs, {sizes}"))
            except Exception as failure:  # sizes that do not fit into a multiprocessor
                found.append((math.inf, f"{sizes}: {failure!r:.80}"))
        launches.packed_config, launches.PROGRAMS = packed_config, pinned
        own = packed_config(shape.D // 2, torch.bfloat16)
        print(f"{shape}: pinned {pinned} programs, {own}: {measure(shape, 4, bandwidth)}", flush=True)
        print(*(f"    {text}" for _, text in sorted(found)[:8]), sep="\n", flush=True)


def _next(q: Tensor, turns: Iterator[PackedKeyValues], window: int | None) -> tuple[Tensor, Tensor]:
    return packed_attention(q, next(turns), window, 4)


def _constant(value: PackedConfig, *_: Any) -> PackedConfig:
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="time other configurations of the kernel")
    parser.add_argument("--output", type=Path, help="folder of the result file; the package's own by default")
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    if args.sweep:
        sweep(bandwidth)
        return
    rows: list[dict[str, Any]] = []
    for shape, bits in itertools.product(SHAPES, (16, 8, 4)):
        row: dict[str, Any] = {"shape": list(shape), "bits": bits}
        try:
            row |= sixteen(shape, bandwidth) if bits == 16 else measure(shape, bits, bandwidth)
        except Exception as error:
            row["failed"] = one_line(error)
        rows.append(row)
        print(row, flush=True)
    notes = {
        "copy_bytes_per_s": bandwidth,
        "shape": "B, tokens, HQ, HK, D; an eighth more places, bfloat16; shares count the keys and values of tokens",
    }
    write("packed_attention_h200.json", rows, notes, args.output)


if __name__ == "__main__":
    main()
