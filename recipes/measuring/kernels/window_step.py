"""Times a decoding step over window and sinks, beside PyTorch: `python -m measuring.kernels window_step`.

Steps of 32 query and 8 key heads of 128. Each form is first compared with the PyTorch form in float64.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from deltanet_kernels import window_step_
from deltanet_kernels.flash_decoding.config import DecodeConfig
from deltanet_kernels.window import step
from deltanet_kernels.window.calls import WindowStepCall
from deltanet_kernels.window.cpu_step import torch_window_step_
from measuring.kernels.harness import Always, Benchmark, Configuration, relative_error, several_caches, time_steps
from measuring.rows import Row

HQ, HK, D = 32, 8, 128
SINKS = 4
FORMS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "deltanet": window_step_,
    "PyTorch": lambda *call: torch_window_step_(WindowStepCall(*call)),
}


def measure(labels: Row, options: argparse.Namespace) -> Row:
    """The figures of the row with these labels."""
    B, window = labels["shape"]
    form = FORMS[labels["impl"]]
    torch.manual_seed(0)
    S = window + SINKS
    q = torch.randn(B, 1, HQ, D, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(B, 1, HK, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    numbers = torch.arange(1, S + 1, device="cuda", dtype=torch.int32).repeat(B, 1)
    count = torch.full((B,), S, device="cuda", dtype=torch.int32)

    def cache(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        torch.manual_seed(1)
        keys, values = (torch.randn(B, HK, S, D, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(2))
        return keys, values, numbers.clone(), count.clone()

    def call(kept: tuple[Tensor, ...]) -> Tensor:
        return form(q, k, v, window, SINKS, *kept)[0]

    wide = q.double(), k.double(), v.double()
    wanted, _ = torch_window_step_(WindowStepCall(*wide, window, SINKS, *cache(torch.float64)))
    size = 4 * B * HK * S * D  # bytes of keys and values
    return time_steps(call, several_caches(cache, size), relative_error(call(cache()), wanted), size)


def rows(peers: bool) -> Iterator[Row]:
    """Labels of the rows."""
    for shape in itertools.product((1, 8, 64, 256), (64, 256, 1024)):
        for impl in FORMS:
            yield {"shape": list(shape), "impl": impl}


def configurations(labels: Row) -> Iterator[Configuration]:
    """Other places per tile, warps and pipeline stages."""
    for places, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (1, 2, 3)):
        yield {(step, "decode_config"): Always(DecodeConfig(places, D, warps, stages))}


NOTE = f"B, window; {HQ} query and {HK} key heads of {D}, {SINKS} sinks, bfloat16"
BENCHMARK = Benchmark(rows, measure, {"shape": NOTE}, True, configurations)
