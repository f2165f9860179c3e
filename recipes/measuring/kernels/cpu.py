"""The gated delta rule on CPU against transformers' `torch_chunk_gated_delta_rule`: time, memory, accuracy.

    python -m measuring.kernels.cpu [--threads 2] [--repeats 15] [--out FILE]

Time: the two run in turn; medians, and the median of the ratios of neighbouring runs. Memory: the peak of the
resident set above the inputs, each in a process of its own (Linux). Accuracy: relative L2 error against float64,
the worst over the outputs and, in the rows with a backward, the gradients of q, k, v, g and beta.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from deltanet_kernels import naive_gated_delta_rule, torch_chunk_gated_delta_rule

B, T, H = 1, 2048, 8
HEAD_SIZES = (64, 128)
OPTIONS = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
RESULTS = Path(__file__).parents[2] / "results/kernels/cpu.json"

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

    def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
        return float((found.double() - wanted).norm() / wanted.norm())

    recurrence = run(naive_gated_delta_rule, [x.detach() for x in wide], False)
    for found, wanted in zip(truth, recurrence, strict=False):
        if not error(found, wanted) < 1e-12:
            raise RuntimeError(f"the float64 truth is off the recurrence by {error(found, wanted):.1e}")
    return {
        name: max(error(a, b) for a, b in zip(run(operator(name), inputs, backward), truth, strict=True))
        for name in names
    }


def cpu_model() -> str:
    """The processor's name as Linux reports it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    """Measure, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    load = os.getloadavg()[0]
    ours, theirs = names = ["deltanet_kernels", "transformers"]
    rows: list[dict[str, Any]] = []
    print("                               time, ms: ours, theirs, ratio    peak, MiB     relative error")
    for D in HEAD_SIZES:
        for backward in (False, True):
            taken = times(names, D, backward, arguments.repeats)
            worst = errors(names, D, backward)
            row: dict[str, Any] = {"B": B, "T": T, "H": H, "K": D, "V": D}
            row["pass"] = "forward+backward" if backward else "forward"
            row["speedup"] = statistics.median(b / a for a, b in zip(taken[ours], taken[theirs], strict=True))
            for name in names:
                peak = peak_bytes(name, D, backward, arguments.threads)
                row[name] = {
                    "median_ms": statistics.median(taken[name]),
                    "best_ms": min(taken[name]),
                    "peak_mib": peak / 2**20,
                    "relative_error": worst[name],
                }
            rows.append(row)
            a, b = row[ours], row[theirs]
            print(
                f"{D:4}, {row['pass']:18}{a['median_ms']:10.1f}{b['median_ms']:11.1f}{row['speedup']:8.2f}"
                f"{a['peak_mib']:7.0f}{b['peak_mib']:7.0f}{a['relative_error']:10.1e}{b['relative_error']:10.1e}",
                flush=True,
            )
    machine = {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": arguments.threads,
        "load_average_before": load,  # well above 0: other work ran beside, the ratio holds, the times are too long
        "system": f"{platform.system()} {platform.machine()}",
    }
    versions = {name: version(name) for name in ("torch", "transformers")} | {"python": platform.python_version()}
    result = {"machine": machine, "versions": versions, "repeats": arguments.repeats, "rows": rows}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
