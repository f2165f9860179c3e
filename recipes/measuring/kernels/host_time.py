"""Times what calls take on the host: `python -m measuring.kernels.host_time --peers`.

The rows are so short that the GPU is done before the host: 64 tokens, 9 heads of 64, bfloat16. A time is that of 20
calls until the last one returns, divided by 20, the median of 30 such runs, in which nothing is compiled or waited for.
Calls: the gated delta rule with q and k normalised, softmax attention, and with `--peers` flash-linear-attention's
`chunk_gated_delta_rule`, each without gradients, with gradients recorded, and with the backward pass. `--profile`
prints where the first one spends its time.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import importlib
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from deltanet_kernels import chunk_gated_delta_rule
from measuring.kernels.table import one_line
from measuring.kernels.timing import write

T, H, D = 64, 9, 64
CALLS, REPEATS = 20, 30
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


def host_us(run: Callable[[], object]) -> float:
    """Median microseconds of a call until it returns; it has run before."""
    times = []
    for _ in range(REPEATS):
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


def figures(timed: dict[str, Callable[[], object]]) -> dict[str, Any]:
    """The column of each call; the first error, if a call raises one, and no columns behind it."""
    row: dict[str, Any] = {}
    try:
        for column, run in timed.items():
            for _ in range(3):  # compiles
                run()
            row[column] = host_us(run)
    except RuntimeError as error:
        row["failed"] = f"{column}: {one_line(error)}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="also flash-linear-attention's operator")
    parser.add_argument("--profile", action="store_true", help="print where the gated delta rule spends its time")
    parser.add_argument("--output", type=Path, help="folder of the result file; the package's own by default")
    options = parser.parse_args()
    calls: dict[str, Call] = {"gated delta rule": functools.partial(delta_rule, chunk_gated_delta_rule)}
    calls["softmax"] = softmax
    if options.peers:
        peer = importlib.import_module(PEER).chunk_gated_delta_rule
        calls["flash-linear-attention"] = functools.partial(delta_rule, peer)
    tensors, do = inputs()
    rows = []
    for name, call in calls.items():
        timed = forms(call, tensors, do)
        rows.append({"call": name, **figures(timed)})
        print(rows[-1], flush=True)
        if options.profile and name == "gated delta rule":
            for run in timed.values():
                _print_profile(run)
    notes = {"shape": f"1 x {T} tokens, {H} heads of {D}", "dtype": "bfloat16", "calls": CALLS, "repeats": REPEATS}
    write("host_time_h200.json", rows, notes, options.output)


def _print_profile(run: Callable[[], object]) -> None:
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(10 * CALLS):
        run()
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
