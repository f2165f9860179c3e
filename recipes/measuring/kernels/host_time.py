"""Times what calls take on the host: `python -m measuring.kernels host_time --peers`.

The rows are so short that the GPU is done before the host: 64 tokens, 9 heads of 64, bfloat16. A time is that of 20
calls until the last one returns, divided by 20, the median of several such runs, in which nothing is compiled or waited
for. Calls: the gated delta rule with q and k normalised, softmax attention, and with `--peers` flash-linear-attention's
`chunk_gated_delta_rule`, each without gradients, with gradients recorded, and with the backward pass.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

from deltanet_kernels import chunk_gated_delta_rule
from measuring.kernels.harness import Benchmark
from measuring.rows import Row, described

T, H, D = 64, 9, 64
CALLS = 20
PEER = "fla.ops.gated_delta_rule"
Call = Callable[..., torch.Tensor]


def inputs() -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v [1, T, H, D] bfloat16, log decays and write strengths [1, T, H] float32; a gradient of the output."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, T, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    g, beta = -torch.rand(1, T, H, device="cuda"), torch.rand(1, T, H, device="cuda")
    return [x.requires_grad_() for x in (q, k, v, g, beta)], do


def softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """Causal softmax attention, which leaves g and beta alone."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def delta_rule(rule: Any, *tensors: torch.Tensor) -> torch.Tensor:
    """The output of a chunked gated delta rule."""
    output: torch.Tensor = rule(*tensors, use_qk_l2norm_in_kernel=True)[0]
    return output


def host_us(run: Callable[[], object], repeats: int) -> float:
    """Median microseconds of a call until it returns; it has run before."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            run()
        times.append((time.perf_counter() - began) / CALLS)
    return round(1e6 * statistics.median(times), 1)


def forms(call: Call, tensors: list[torch.Tensor], do: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The timed calls by the name of their column."""

    def without_gradients() -> torch.Tensor:
        with torch.no_grad():
            return call(*tensors)

    def with_backward() -> object:
        return torch.autograd.grad(call(*tensors), tensors, do, allow_unused=True)

    return {"forward_us": without_gradients, "recorded_us": lambda: call(*tensors), "fwdbwd_us": with_backward}


def measure(labels: Row, options: argparse.Namespace) -> Row:
    """The columns of a call; the first error, if it raises one, and no columns after it."""
    call: Call = softmax
    if labels["call"] != "softmax":
        ours = labels["call"] == "gated delta rule"
        rule = chunk_gated_delta_rule if ours else importlib.import_module(PEER).chunk_gated_delta_rule
        call = functools.partial(delta_rule, rule)
    row: Row = {}
    try:
        for column, run in forms(call, *inputs()).items():
            for _ in range(3):  # compiles
                run()
            row[column] = host_us(run, options.repeats)
    except RuntimeError as error:
        row["error"] = f"{column}: {described(error)}"
    return row


def rows(peers: bool) -> Iterator[Row]:
    """Labels of the rows."""
    for call in ("gated delta rule", "softmax", *(["flash-linear-attention"] if peers else [])):
        yield {"call": call}


NOTES = {"shape": f"1 x {T} tokens, {H} heads of {D}", "dtype": "bfloat16", "calls": CALLS}
BENCHMARK = Benchmark(rows, measure, NOTES)
