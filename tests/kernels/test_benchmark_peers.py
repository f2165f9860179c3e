"""Peers of the benchmarks, with modules in their places: the conventions of their arguments, and their rows."""

import argparse
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from deltanet_kernels.channel_gates.cpu import chunked as channel_chunked
from measuring.kernels import channel_gates, harness

SHAPE = (2, 37, 2, 16)
OPTIONS = argparse.Namespace(first_seconds=60.0, repeats=1)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators in PyTorch, and a clock that only calls."""

    def timed(run: Callable[[], object], repeats: int = 20) -> float:
        run()
        return 1.0

    monkeypatch.setattr(channel_gates, "DEVICE", "cpu")
    for name in ("median_ms", "peak_gib", "call_without_waiting"):
        monkeypatch.setattr(harness, name, timed)
    monkeypatch.setattr(harness, "graph_us", lambda run, calls, repeats: timed(run))
    monkeypatch.setattr(channel_gates, "chunk_channel_gated_delta_rule_triton", channel_chunked)
    channel_gates.reference.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, path: str, function: Callable[..., Any]) -> None:
    """A module `fla.ops.NAME` with `function` under its own name."""
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType(path)
    setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, path, module)


@pytest.mark.parametrize("rule", channel_gates.RULES)
@pytest.mark.parametrize("strongest", [-1.0, -5.0])
def test_our_rows_of_channel_gates(rule: str, strongest: float) -> None:
    row = channel_gates.measure(
        {"rule": rule, "shape": list(SHAPE), "gates": [strongest, 0.0], "impl": "deltanet"}, OPTIONS
    )
    assert row["rel_error"] < 0.01
    assert {*harness.TIMES, "peak_gib"} < row.keys()


def test_the_peer_of_bounded_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []

    def chunk_kda(*leaves: torch.Tensor, use_qk_l2norm_in_kernel: bool, safe_gate: bool) -> tuple[torch.Tensor]:
        assert use_qk_l2norm_in_kernel
        told.append(safe_gate)
        return (channel_gates.ours("kda")(*leaves),)

    install(monkeypatch, "fla.ops.kda", chunk_kda)
    for impl in ("fla", channel_gates.BOUNDED):
        told.clear()
        labels = {"rule": "kda", "shape": list(SHAPE), "gates": [-5.0, 0.0], "impl": impl}
        assert channel_gates.measure(labels, OPTIONS)["rel_error"] < 0.01
        assert set(told) == {impl == channel_gates.BOUNDED}
