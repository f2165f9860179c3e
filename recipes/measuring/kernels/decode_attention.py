"""Times attention of one query per sequence to a long cache: `python -m measuring.kernels.decode_attention`.

The cache has an eighth more places than tokens, as that of a recorded decoding step. Peers: SDPA with the mask of the
places, its query heads grouped so that it reads keys and values once, and SDPA without a mask over the tokens alone,
which PyTorch computes by FlashAttention. Each is first compared with float64. All run in a CUDA graph, on several
caches in turn, so that none stays in the L2 cache.

    python -m measuring.kernels.decode_attention --sweep

times the operator with other tile sizes, pipeline stages, warps and numbers of spans, and writes no file.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from deltanet_kernels import decode_attention
from deltanet_kernels.flash_decoding import attention, config
from deltanet_kernels.flash_decoding.calls import DecodeAttentionCall
from deltanet_kernels.flash_decoding.config import DecodeConfig, decode_config
from deltanet_kernels.flash_decoding.reference import torch_decode_attention
from measuring.kernels.table import one_line
from measuring.kernels.timing import copy_bandwidth, graph_us, write


class Shape(NamedTuple):
    """Sequences, tokens of each, query and key heads, head size."""

    B: int
    tokens: int
    HQ: int
    HK: int
    D: int

    @property
    def bytes(self) -> int:
        """Of the keys and values of all tokens, in bfloat16."""
        return 4 * self.B * self.tokens * self.HK * self.D


class Inputs(NamedTuple):
    """Queries, a mask, keys and values of several caches, and the true result with the first."""

    q: torch.Tensor
    mask: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    wanted: torch.Tensor


SHAPES = [
    Shape(B, tokens, *heads)
    for heads in ((32, 8, 128), (9, 3, 64))
    for B, tokens in ((1, 2048), (1, 32768), (16, 2048), (16, 16384))
]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def over_tokens(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """SDPA without a mask: the tokens are the first eight ninths of the places."""
    tokens = k.shape[2] // 9 * 8
    return scaled_dot_product_attention(q, k[:, :, :tokens], v[:, :, :tokens], enable_gqa=True)


IMPLEMENTATIONS: dict[str, Attention] = {
    "deltanet": decode_attention,
    "sdpa, mask": lambda *call: torch_decode_attention(DecodeAttentionCall(*call)),
    "sdpa, no mask": over_tokens,
}


def make(shape: Shape) -> Inputs:
    torch.manual_seed(0)
    B, tokens, HQ, HK, D = shape
    places = tokens // 8 * 9
    q = torch.randn(B, HQ, 1, D, device="cuda", dtype=torch.bfloat16)
    mask = (torch.arange(places, device="cuda") < tokens).expand(B, 1, 1, places).contiguous()
    caches = []
    for _ in range(max(1, min(64, 2**28 // shape.bytes))):
        k, v = (torch.randn(B, HK, places, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        caches.append((k, v))
    k, v = caches[0]
    wanted = torch_decode_attention(DecodeAttentionCall(q.double(), k.double(), v.double(), mask))
    return Inputs(q, mask, caches, wanted)


def measure(run: Attention, inputs: Inputs, size: int, bandwidth: float) -> dict[str, Any]:
    q, mask, caches, wanted = inputs
    error = ((run(q, *caches[0], mask).double() - wanted).norm() / wanted.norm()).item()
    found: dict[str, Any] = {"rel_error": error}
    if not error < 1e-2:
        return found
    turns = itertools.cycle(caches)
    found["us"] = round(graph_us(lambda: run(q, *next(turns), mask), max(4, len(caches))), 3)
    found["share_of_copy_bandwidth"] = round(size / (found["us"] * 1e-6) / bandwidth, 3)
    return found


def sweep(bandwidth: float) -> None:
    """Print the times of other configurations, the fastest first."""
    pinned = config.PROGRAMS
    for shape in SHAPES:
        inputs, own = make(shape), decode_config(shape.D, torch.bfloat16)
        found: list[tuple[float, str]] = []
        for programs, tile, stages, warps in itertools.product((2, 4, 8), (32, 64, 128), (2, 3, 4), (4, 8)):
            sizes = DecodeConfig(tile, own.D, warps, stages)
            attention.decode_config = functools.partial(_constant, sizes)
            config.PROGRAMS = programs
            try:
                row = measure(decode_attention, inputs, shape.bytes, bandwidth)
                found.append((row.get("us", math.inf), f"{programs} programs, {sizes}: {row}"))
            except Exception as failure:  # sizes that do not fit into a multiprocessor
                print(sizes, repr(failure)[:80], flush=True)
        attention.decode_config, config.PROGRAMS = decode_config, pinned
        row = measure(decode_attention, inputs, shape.bytes, bandwidth)
        print(f"{shape}: pinned {pinned} programs, {own}: {row}", flush=True)
        print(*(f"    {text}" for _, text in sorted(found)[:8]), sep="\n", flush=True)


def _constant(value: DecodeConfig, *_: Any) -> DecodeConfig:
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
    for shape in SHAPES:
        inputs = make(shape)
        for name, run in IMPLEMENTATIONS.items():
            row: dict[str, Any] = {"shape": list(shape), "impl": name}
            try:
                row |= measure(run, inputs, shape.bytes, bandwidth)
            except Exception as error:
                row["failed"] = one_line(error)
            rows.append(row)
            print(row, flush=True)
    notes = {
        "copy_bytes_per_s": bandwidth,
        "shape": "B, tokens, HQ, HK, D; an eighth more places, bfloat16; shares count the keys and values of tokens",
    }
    write("decode_attention_h200.json", rows, notes, args.output)


if __name__ == "__main__":
    main()
