"""One loop for all benchmarks of kernels: labels of rows, inputs, a check beside float64, times, a row in the file.

A benchmark is a file with its rows and what measures one; `python -m measuring.kernels NAME` runs it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from measuring.kernels.timing import call_without_waiting, copy_bandwidth, graph_us, median_ms, peak_gib
from measuring.rows import Row, RowFile, described, fill, machine

RESULTS = Path(__file__).parents[2] / "results/kernels"
PEERS = ("triton", "transformers", "flash-linear-attention", "flash-qla", "tilelang", "flashinfer-python")
MOST = 0.05  # relative error of right results, outputs and gradients in bfloat16
MOST_OF_A_STEP = 0.01  # of a decoding step
TIMES = ("fwd_ms", "fwdbwd_ms", "fwd_graph_ms", "fwdbwd_graph_ms")

Operator = Callable[..., Tensor]
"""Computes o [B, T, heads, D] from the leaves of a benchmark."""
Configuration = dict[tuple[Any, str], Any]
"""(module, name) -> what stands in its place, such as other sizes of tiles."""


@dataclass(frozen=True)
class Benchmark:
    """The rows of a result file.

    Args:
        rows: the labels in the order of measurement; the argument says whether with the peers' rows. Labels with
            `impl` are `deltanet` for ours and `fla` for the peer's.
        measure: the figures of the row with these labels.
        notes: what the file says about all rows.
        bandwidth: whether the file has the device's copy bandwidth, too.
        configurations: of the kernels, for `--sweep`.
    """

    rows: Callable[[bool], Iterable[Row]]
    measure: Callable[[Row, argparse.Namespace], Row]
    notes: Row = field(default_factory=dict)
    bandwidth: bool = False
    configurations: Callable[[Row], Iterable[Configuration]] | None = None


def run(name: str, benchmark: Benchmark, arguments: Sequence[str]) -> None:
    """Measure the rows of a benchmark by the options of a command line."""
    options = _parser(name).parse_args(arguments)
    os.environ.setdefault("FLA_FLASH_QLA", "0")  # flash-linear-attention's own kernels, not FlashQLA's in their place
    every = list(benchmark.rows(options.peers))
    chosen = [row for row in every if _is_chosen(row, options.only)]
    if options.sweep:
        sweep(benchmark, chosen, options)
        return
    head: Row = {"machine": machine(*PEERS), "repeats": options.repeats, **benchmark.notes}
    head |= {"copy_bytes_per_s": copy_bandwidth()} if benchmark.bandwidth else {}
    key = tuple(dict.fromkeys(label for row in every for label in row))
    path = (options.output or RESULTS) / f"{name}{_device_suffix()}.json"

    def measure(labels: Row) -> Row:
        try:
            return benchmark.measure(labels, options)
        except OverTime as error:
            return {"unfinished": str(error)}

    fill(
        RowFile(path, key, head, not options.resume, functools.partial(with_ratios, key)),
        chosen,
        measure,
        options.minutes,
    )


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m measuring.kernels {name}")
    parser.add_argument("--peers", action="store_true", help="also time other implementations that are installed")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="LABEL=VALUE", help="only rows with one of these values of each label"
    )
    parser.add_argument("--repeats", type=int, default=20, help="timed calls per number, of which the median is taken")
    parser.add_argument("--minutes", type=float, default=8, help="begin no further row after so many minutes")
    parser.add_argument("--first-seconds", type=float, default=60, help="give up a row without results after these")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the result file, add the missing ones")
    parser.add_argument("--sweep", action="store_true", help="time other configurations of our kernels; write no file")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="of the result file; default: recipes/results/kernels"
    )
    return parser


def _device_suffix() -> str:
    """_h200 of an NVIDIA H200; empty without a GPU."""
    return f"_{torch.cuda.get_device_name().split()[1].lower()}" if torch.cuda.is_available() else ""


def _is_chosen(row: Row, only: Sequence[str]) -> bool:
    """Whether each label that is given has one of the values that are given for it."""
    given: dict[str, list[str]] = {}
    for entry in only:
        name, _, value = entry.partition("=")
        given.setdefault(name, []).append(value.replace(" ", ""))
    return all(
        str(row.get(name)).replace(" ", "") in values or json.dumps(row.get(name), separators=(",", ":")) in values
        for name, values in given.items()
    )


def with_ratios(key: Sequence[str], rows: list[Row]) -> list[Row]:
    """The rows; ours with the times of the peer's row that has the same other labels, divided by ours."""

    def shared(row: Row) -> str:
        return json.dumps([row.get(label) for label in key if label != "impl"])

    peers = {shared(row): row for row in rows if row.get("impl") == "fla"}

    def ratios(ours: Row) -> Row:
        peer = peers.get(shared(ours), {}) if ours.get("impl") == "deltanet" else {}
        both = [name for name in TIMES if name in ours and name in peer]
        return {f"{name.removesuffix('_ms')}_ratio": round(peer[name] / ours[name], 2) for name in both}

    return [row | ratios(row) for row in rows]


def sweep(benchmark: Benchmark, rows: Iterable[Row], options: argparse.Namespace) -> None:
    """Print the times of our rows by the kernels' own configuration, and of the fastest of the others."""
    if benchmark.configurations is None:
        print("this benchmark has one configuration")
        return
    for labels in (row for row in rows if row.get("impl", "deltanet").startswith("deltanet")):
        print(f"{labels}: {benchmark.measure(labels, options)}", flush=True)
        found: list[tuple[float, str]] = []
        for configuration in benchmark.configurations(labels):
            with ExitStack() as stack:
                for (module, name), value in configuration.items():
                    stack.enter_context(patch.object(module, name, value))
                words = ", ".join(str(getattr(value, "sizes", value)) for value in configuration.values())
                try:
                    row = benchmark.measure(labels, options)
                    found.append((row.get("us") or row.get("fwdbwd_ms") or math.inf, f"{words}: {row}"))
                except Exception as error:  # sizes that do not fit into a multiprocessor
                    found.append((math.inf, f"{words}: {described(error)}"))
        print(*(f"    {text}" for _, text in sorted(found)[:8]), sep="\n", flush=True)


class Always:
    """A function of a configuration that gives the same sizes whatever it is asked."""

    def __init__(self, sizes: Any) -> None:
        self.sizes = sizes

    def __call__(self, *_: Any) -> Any:
        return self.sizes


class OverTime(BaseException):
    """The limit of `time_limit` is over; no Exception, which the interrupted code could catch."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OverTime` after so many seconds, in the main thread, which also computes the backward passes meanwhile.

    The call of a compiler or a kernel that is under way then ends first.
    """

    def stop(*_: Any) -> None:
        raise OverTime(f"no first results within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            signal.setitimer(signal.ITIMER_REAL, seconds)
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_and_time(
    run: Callable[[], Tensor],
    leaves: Sequence[Tensor],
    do: Tensor,
    wanted: Sequence[Tensor] | None,
    options: argparse.Namespace,
    most: float = MOST,
) -> Row:
    """Compare the outputs and gradients of an implementation, then time it if they are right.

    Args:
        run: computes o from the leaves.
        leaves: get gradients; empty for an implementation without a backward pass.
        do: gradient of o.
        wanted: o and the gradients of the leaves of the first row and the first heads, float64; None for one that
            computes something else.
        options: `first_seconds` and `repeats`.
        most: relative error of right results.

    Returns:
        rel_error, the largest relative L2 error of o and the gradients, the times of `time_both_ways` of fwd and
        fwdbwd, and peak_gib of fwdbwd; without times and with `error` if o is wrong. If the gradients are wrong or
        missing (rel_error is then that of o), only the forward pass is timed, and `error` or `unfinished` says why.
    """
    with time_limit(options.first_seconds):
        found, refusal = [run()], {}
        try:
            found += torch.autograd.grad(found[0], leaves, do) if leaves else []
        except OverTime as error:
            refusal = {"unfinished": f"backward: {error}"}
        except Exception as error:
            refusal = {"error": f"backward: {described(error)}"}
    row: Row = {}
    if wanted is not None:
        errors = relative_errors(found, wanted[: len(found)])
        row["rel_error"] = max(errors)
        if errors[0] > most:
            return row | {"error": "wrong results"}
        if max(errors) > most:
            refusal = {"error": "backward: wrong results"}
    del found

    def forward() -> None:
        with torch.no_grad():
            run()

    def both() -> None:
        torch.autograd.grad(run(), leaves, do)

    row |= time_both_ways("fwd", forward, options.repeats)
    if refusal or not leaves:
        return row | refusal
    return row | {"peak_gib": round(peak_gib(both), 4)} | time_both_ways("fwdbwd", both, options.repeats)


def time_both_ways(name: str, run: Callable[[], object], repeats: int) -> Row:
    """Median times of a call that has run before: NAME_ms, launched eagerly, and NAME_graph_ms, in a CUDA graph.

    The graph holds calls for about 2 ms, next to which its own launch counts little. What cannot be captured has the
    reason as NAME_not_captured.
    """
    eager = median_ms(run, repeats)
    row: Row = {f"{name}_ms": round(eager, 4)}
    try:
        call_without_waiting(run)
        row[f"{name}_graph_ms"] = round(graph_us(run, 1 + int(2 / eager), repeats) / 1e3, 4)
    except Exception as error:
        row[f"{name}_not_captured"] = described(error)
    return row


def in_float64(run: Operator, leaves: Sequence[Tensor], do: Tensor, heads: Sequence[int]) -> list[Tensor]:
    """Computes in float64 what `check_and_time` compares with: o and the gradients of the first heads of the first row.

    Args:
        run: computes o from the leaves, in float64.
        leaves, do: as of `check_and_time`; o has the first heads.
        heads: how many first heads of each leaf are taken.
    """
    own = [x.detach()[:1, :, :n].double().requires_grad_() for x, n in zip(leaves, heads, strict=True)]
    o = run(*own)
    return [o.detach(), *torch.autograd.grad(o, own, do[:1, :, : o.shape[2]].double())]


def relative_errors(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[float]:
    """Relative L2 errors of the first heads of the first row, as many as are wanted; NaN counts as infinite."""
    return [relative_error(x.detach()[:1, :, : y.shape[2]], y) for x, y in zip(found, wanted, strict=True)]


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """||found - wanted|| / ||wanted||; NaN counts as infinite."""
    error = ((found.double() - wanted).norm() / wanted.norm()).item()
    return error if error == error else math.inf


def time_steps(step: Callable[[Any], object], caches: Sequence[Any], error: float, size: float) -> Row:
    """The row of a decoding step that was compared with float64, timed in a CUDA graph.

    Args:
        step: takes one cache.
        caches: used in turn, so many that none stays in the L2 cache.
        error: relative error of the step.
        size: bytes that a step has to move.

    Returns:
        rel_error, us, and share_of_copy_bandwidth, the time of copying so many bytes divided by the step's; without
        times and with `error` if the step is wrong.
    """
    if not error < MOST_OF_A_STEP:
        return {"rel_error": error, "error": "wrong results"}
    turns: Iterator[Any] = itertools.cycle(caches)
    us = round(graph_us(lambda: step(next(turns)), max(4, len(caches))), 3)
    return {"rel_error": error, "us": us, "share_of_copy_bandwidth": round(size / (us * 1e-6) / copy_bandwidth(), 3)}


def several_caches(make: Callable[[], Any], size: float) -> list[Any]:
    """Caches of `size` bytes each, 256 MB together but at most 64."""
    return [make() for _ in range(max(1, min(64, int(2**28 // size))))]
