"""Benchmarks beside peers: their files, the order of rows, resumption, limits of time, errors as rows."""

import argparse
import contextlib
import json
import math
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from measuring import rows as row_files
from measuring.kernels import group, harness
from measuring.kernels.harness import Benchmark, OverTime, check_and_time, relative_errors, time_limit
from measuring.rows import Row
from tests.kernels.triton_mode import DEVICE

LABELS: list[Row] = [{"rule": r, "shape": [2, 3], "impl": i} for r in "ab" for i in ("deltanet", "fla")]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only calls, and files without the name of a GPU."""

    def timed(run: Callable[[], object], repeats: int = 20) -> float:
        run()
        return 2.0

    for name in ("median_ms", "peak_gib", "call_without_waiting"):
        monkeypatch.setattr(harness, name, timed)
    monkeypatch.setattr(harness, "graph_us", lambda run, calls, repeats: 500 * calls * timed(run))
    monkeypatch.setattr(harness, "_device_suffix", str)


def options(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"first_seconds": 60.0, "repeats": 1, **changes})


def run(folder: Path, measure: Callable[[Row], Row], *arguments: str) -> None:
    """A benchmark of LABELS by the command line."""
    benchmark = Benchmark(lambda peers: LABELS, lambda labels, _: measure(labels), {"note": "n"})
    harness.run("rows", benchmark, ["--output", str(folder), *arguments])


def rows_of(folder: Path) -> list[Row]:
    return json.loads((folder / "rows.json").read_text())["rows"]


def test_every_row_is_written_at_once_and_ours_get_ratios(tmp_path: Path) -> None:
    both = {"fwd_ms": 3.0, "fwdbwd_ms": 8.0}
    times = iter([{"fwd_ms": 2.0, "fwdbwd_ms": 4.0}, both, {"fwd_ms": 1.0}, {"fwd_ms": 5.0}])
    lengths = []

    def measure(labels: Row) -> Row:
        lengths.append(len(rows_of(tmp_path)) if (tmp_path / "rows.json").exists() else 0)
        return next(times)

    run(tmp_path, measure)
    assert lengths == [0, 1, 2, 3]
    rows = rows_of(tmp_path)
    assert [{key: row[key] for key in LABELS[0]} for row in rows] == LABELS
    assert (rows[0]["fwd_ratio"], rows[0]["fwdbwd_ratio"], rows[2]["fwd_ratio"]) == (1.5, 2.0, 5.0)
    assert not {"fwdbwd_ratio"} & rows[2].keys()
    assert all("ratio" not in key for row in rows[1::2] for key in row)


def test_errors_are_rows_and_only_unfinished_ones_are_measured_again(tmp_path: Path) -> None:
    def measure(labels: Row) -> Row:
        if labels["impl"] == "deltanet":
            return {"fwd_ms": 1.0}
        raise RuntimeError("refuses\nto run" + 400 * "x") if labels["rule"] == "a" else OverTime("no first results")

    run(tmp_path, measure)
    rows = rows_of(tmp_path)
    assert rows[1]["error"].startswith("RuntimeError: refuses to runxxx")
    assert len(rows[1]["error"]) == 300
    assert rows[3]["unfinished"] == "no first results"
    assert "fwd_ratio" not in rows[0]

    again: list[Row] = []
    run(tmp_path, lambda labels: again.append(labels) or {"fwd_ms": 3.0}, "--resume")
    assert again == LABELS[3:]
    assert rows_of(tmp_path)[:3] == [*rows[:2], rows[2] | {"fwd_ratio": 3.0}]
    run(tmp_path, lambda labels: again.append(labels) or {})
    assert again[1:] == LABELS  # without --resume all of them


def test_no_row_begins_after_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    clock = [0.0]
    monkeypatch.setattr(row_files.time, "monotonic", lambda: clock[0])

    def measure(labels: Row) -> Row:
        clock[0] += 50
        return {}

    run(tmp_path, measure, "--minutes", "1.5")
    assert [row["impl"] for row in rows_of(tmp_path)] == ["deltanet", "fla"]
    assert "the time is over" in capsys.readouterr().out
    run(tmp_path, measure, "--resume")
    assert len(rows_of(tmp_path)) == 4


def test_an_interrupt_ends_the_run_and_is_no_row(tmp_path: Path) -> None:
    def measure(labels: Row) -> Row:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, measure)
    assert not (tmp_path / "rows.json").exists()


def tuning_without_end() -> None:
    """As of a library that catches every Exception."""
    for _ in range(2000):
        with contextlib.suppress(Exception):
            time.sleep(0.01)


class Squares(torch.autograd.Function):
    """x * x, whose backward pass is a given function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backward: Callable[[], object]) -> torch.Tensor:
        ctx.backward = backward
        return x * x

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert threading.current_thread() is threading.main_thread()
        ctx.backward()
        return do, None


def refuses() -> None:
    raise RuntimeError("Triton >= 3.4.0 and < 3.7.1 on Hopper")


def test_a_limit_ends_loops_and_backward_passes_and_nothing_afterwards() -> None:
    before = signal.getsignal(signal.SIGALRM)
    x = torch.ones(3, requires_grad=True)
    for run in (tuning_without_end, lambda: Squares.apply(x, tuning_without_end).sum().backward()):
        began = time.monotonic()
        with pytest.raises(OverTime, match=r"within 0\.05 s"), time_limit(0.05):
            run()
        assert time.monotonic() - began < 2
    with time_limit(0.05):
        pass
    time.sleep(0.07)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert torch.autograd.is_multithreading_enabled()


def square(x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
    do = torch.ones_like(x)
    return [x], do, [x.detach().double()[:1, :, :1] ** 2, 2 * x.detach().double()[:1, :, :1]]


def test_right_results_are_timed_and_wrong_ones_not(tmp_path: Path) -> None:
    x = torch.randn(2, 5, 3, 4, requires_grad=True)
    row = check_and_time(lambda: x * x, *square(x), options())
    assert row["rel_error"] < 1e-6
    times = dict.fromkeys(harness.TIMES, 2.0)  # by two calls in each graph
    assert row | {"rel_error": 0} == {"rel_error": 0, "peak_gib": 2.0, **times}
    for wrong in (lambda: x * x * 1.1, lambda: x * x * torch.nan, lambda: (x * x).roll(1, 1)):
        row = check_and_time(wrong, *square(x), options())
        assert row["error"] == "wrong results"
        assert "fwd_ms" not in row
    detached = check_and_time(lambda: 0.5 * x * x + 0.5 * x.detach() ** 2, *square(x), options())
    assert (detached["error"], detached["fwd_ms"]) == ("backward: wrong results", 2.0)
    assert "fwdbwd_ms" not in detached
    without_a_number = torch.full((1, 1, 1, 1), math.nan)
    assert relative_errors([without_a_number], [torch.ones(1, 1, 1, 1).double()]) == [math.inf]


def test_what_cannot_be_captured_keeps_its_eager_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(run: Callable[[], object]) -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(harness, "call_without_waiting", waits)
    x = torch.randn(2, 5, 3, 4, requires_grad=True)
    row = check_and_time(lambda: x * x, *square(x), options())
    reason = "RuntimeError: called a synchronizing CUDA operation"
    assert (row["fwd_ms"], row["fwd_not_captured"]) == (2.0, reason)
    assert (row["fwdbwd_ms"], row["fwdbwd_not_captured"]) == (2.0, reason)
    assert not {"error", "fwd_graph_ms", "fwdbwd_graph_ms"} & row.keys()


def test_the_forward_pass_of_a_peer_without_a_backward_pass_is_timed(tmp_path: Path) -> None:
    x = torch.randn(2, 5, 3, 4, requires_grad=True)
    row = check_and_time(lambda: Squares.apply(x, refuses), *square(x), options())
    assert row["error"] == "backward: RuntimeError: Triton >= 3.4.0 and < 3.7.1 on Hopper"
    assert (row["fwd_ms"], "fwdbwd_ms" in row) == (2.0, False)
    row = check_and_time(lambda: Squares.apply(x, tuning_without_end), *square(x), options(first_seconds=0.1))
    assert row["unfinished"] == "backward: no first results within 0.1 s"
    assert (row["fwd_ms"], "fwdbwd_ms" in row) == (2.0, False)


def test_rows_are_chosen_by_their_labels(tmp_path: Path) -> None:
    chosen: list[Row] = []
    run(tmp_path, lambda labels: chosen.append(labels) or {}, "--only", "rule=b", "shape=[2, 3]", "impl=fla", "impl=x")
    assert chosen == [LABELS[3]]


def test_a_sweep_measures_every_configuration_and_leaves_the_kernels_as_they_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module: Any = ModuleType("kernels")
    module.sizes = lambda *_: 4

    def measure(labels: Row, _: argparse.Namespace) -> Row:
        size = module.sizes("forward")
        if size == 1:
            raise RuntimeError("does not fit")
        return {"us": 100.0 - size}

    sizes = [{(module, "sizes"): harness.Always(size)} for size in (1, 8, 16)]
    benchmark = Benchmark(lambda peers: LABELS, measure, configurations=lambda labels: sizes)
    harness.run("rows", benchmark, ["--sweep", "--only", "rule=a", "--output", str(tmp_path)])
    assert capsys.readouterr().out.splitlines() == [
        f"{LABELS[0]}: {{'us': 96.0}}",
        "    16: {'us': 84.0}",
        "    8: {'us': 92.0}",
        "    1: RuntimeError: does not fit",
    ]
    assert module.sizes() == 4
    assert not list(tmp_path.iterdir())


def test_the_group_rule_is_measured_beside_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, which Triton's interpreter computes rightly."""
    monkeypatch.setattr(group, "DEVICE", DEVICE)
    monkeypatch.setattr(harness, "peak_gib", lambda run: 1.0)
    monkeypatch.setattr(harness, "time_both_ways", lambda name, run, repeats: {f"{name}_ms": 2.0})
    make = group.make

    def single(shape: group.Shape) -> tuple[list[torch.Tensor], torch.Tensor]:
        leaves, do = make(shape)
        return [x.detach().float().requires_grad_() for x in leaves], do.float()

    monkeypatch.setattr(group, "make", single)
    monkeypatch.setattr(group, "SHAPES", [(1, 33, 1, 1, 16)])
    rows = list(group.rows(False))
    assert [row["impl"] for row in rows] == ["deltanet", "rule"]
    for labels in rows:
        row = group.measure(labels, options())
        assert row["rel_error"] < 1e-5
        assert row["fwdbwd_ms"] == 2.0
    sizes = [str(value.sizes) for found in group.configurations(rows[0]) for value in found.values()]
    assert len(set(sizes)) == len(sizes)
