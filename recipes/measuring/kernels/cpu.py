"""The gated delta rule on a CPU beside transformers' `torch_chunk_gated_delta_rule`: time, memory, accuracy.

    OMP_NUM_THREADS=2 python -m measuring.kernels cpu --repeats 15

Time: the two run in turn; medians, and the median of the ratios of neighbouring runs. Memory: the peak of the
resident set above the inputs, each in a process of its own (Linux). Accuracy: relative L2 error against float64,
the worst over the outputs and, in the rows with a backward, the gradients of q, k, v, g and beta.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from deltanet_kernels import naive_gated_delta_rule, torch_chunk_gated_delta_rule
from measuring.kernels.harness import Benchmark, relative_error
from measuring.rows import Row

B, T, H = 1, 2048, 8
HEAD_SIZES = (64, 128)
OPTIONS = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}

Operator = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def operator(name: str) -> Operator:
    """One of the two candidates; transformers is imported only here."""
    if name == "deltanet_kernels":
        return torch_chunk_gated_delta_rule
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as other
    from transformers.utils import logging

    logging.set_verbosity_error()  # else it says on every start that this is its slow form
    return other


def make_inputs(D: int, backward: bool, T: int = T) -> list[torch.Tensor]:
    """q, k, v, g, beta in float32; mean log decays from -0.01 to -0.1 by head, beta in (0, 1)."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, H, D) for _ in range(3))
    g = -torch.linspace(0.01, 0.1, H) * 2 * torch.rand(B, T, H)
    return [x.requires_grad_(backward) for x in (q, k, v, g, torch.rand(B, T, H))]


def run(function: Operator, inputs: list[torch.Tensor], backward: bool) -> list[torch.Tensor]:
    """o, final state, and with `backward` the gradients."""
    with torch.set_grad_enabled(backward):
        o, state = function(*inputs, **OPTIONS)
    assert state is not None
    if not backward:
        return [o, state]
    upstream = [inputs[2].detach(), torch.ones((), dtype=state.dtype).expand_as(state)]  # v serves as the gradient of o
    return [o.detach(), state.detach(), *torch.autograd.grad([o, state], inputs, upstream)]


def times(names: list[str], D: int, backward: bool, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of every candidate, run in turn."""
    inputs = make_inputs(D, backward)
    functions = {name: operator(name) for name in names}
    taken: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats + 2):
        for name, function in functions.items():
            start = time.perf_counter()
            run(function, inputs, backward)
            if repeat >= 2:
                taken[name].append(1e3 * (time.perf_counter() - start))
    return taken


def _status(key: str) -> int:
    """A figure of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {key}")


def _peak(name: str, D: int, backward: bool, threads: int) -> int:
    torch.set_num_threads(threads)
    inputs = make_inputs(D, backward)
    function = operator(name)
    run(function, make_inputs(16, backward, T=130), backward)  # load libraries before measuring the call
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
    before = _status("VmRSS")
    run(function, inputs, backward)
    return _status("VmHWM") - before


def peak_bytes(name: str, D: int, backward: bool, threads: int) -> int:
    """Peak resident bytes above the inputs, in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (name, D, backward, threads))


def errors(names: list[str], D: int, backward: bool) -> dict[str, float]:
    """Worst relative L2 error of every candidate against float64.

    The recurrence would need tens of GB for its gradients at this length, so the truth is the chunked form in float64,
    after its outputs have been compared with those of the recurrence in float64.
    """
    inputs = make_inputs(D, backward)
    wide = [x.detach().double().requires_grad_(backward) for x in inputs]
    truth = run(torch_chunk_gated_delta_rule, wide, backward)

    recurrence = run(naive_gated_delta_rule, [x.detach() for x in wide], False)
    for found, wanted in zip(truth, recurrence, strict=False):
        if not relative_error(found, wanted) < 1e-12:
            raise RuntimeError(f"the float64 truth is off the recurrence by {relative_error(found, wanted):.1e}")
    return {
        name: max(relative_error(a, b) for a, b in zip(run(operator(name), inputs, backward), truth, strict=True))
        for name in names
    }


def measure(labels: Row, options: argparse.Namespace) -> Row:
    """The figures of both candidates."""
    D, backward = labels["K"], labels["pass"] != "forward"
    ours, theirs = names = ["deltanet_kernels", "transformers"]
    taken = times(names, D, backward, options.repeats)
    worst = errors(names, D, backward)
    row: Row = {"speedup": statistics.median(b / a for a, b in zip(taken[ours], taken[theirs], strict=True))}
    for name in names:
        row[name] = {
            "median_ms": statistics.median(taken[name]),
            "best_ms": min(taken[name]),
            "peak_mib": peak_bytes(name, D, backward, torch.get_num_threads()) / 2**20,
            "relative_error": worst[name],
        }
    return row


def rows(peers: bool) -> Iterator[Row]:
    """Labels of the rows."""
    for D in HEAD_SIZES:
        for what in ("forward", "forward+backward"):
            yield {"B": B, "T": T, "H": H, "K": D, "V": D, "pass": what}


BENCHMARK = Benchmark(
    rows,
    measure,
    # A load well above 0: other work ran beside, the ratio holds, the times are too long.
    {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "load_average_before": os.getloadavg()[0]},
)
