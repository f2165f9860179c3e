"""Peers of the benchmarks, with modules in their places: the conventions of their arguments, and their rows."""

import argparse
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from deltanet_kernels import torch_chunk_gated_delta_rule
from deltanet_kernels.channel_gates.cpu import chunked as channel_chunked
from measuring.kernels import channel_gates, chunk, harness

SHAPE = (2, 37, 2, 16)
OPTIONS = argparse.Namespace(first_seconds=60.0, repeats=1)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The operators in PyTorch, and a clock that only calls."""

    def timed(run: Callable[[], object], repeats: int = 20) -> float:
        run()
        return 1.0

    for module in (channel_gates, chunk):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    for name in ("median_ms", "peak_gib", "call_without_waiting"):
        monkeypatch.setattr(harness, name, timed)
    monkeypatch.setattr(harness, "graph_us", lambda run, calls, repeats: 1e3 * timed(run))
    monkeypatch.setattr(channel_gates, "chunk_channel_gated_delta_rule_triton", channel_chunked)
    yield
    for module in (channel_gates, chunk):
        module.reference.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, path: str, function: Callable[..., Any]) -> None:
    """The module of this path with `function` under its own name."""
    names = path.split(".")
    for count in range(1, len(names) + 1):
        monkeypatch.setitem(sys.modules, ".".join(names[:count]), module := ModuleType(path))
    setattr(module, function.__name__, function)


@pytest.mark.parametrize(("rule", "strongest"), zip(channel_gates.RULES, (-1.0, -5.0, -5.0), strict=True))
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


SHAPES = [
    chunk.Shape(3, 70, 2, 4, 16),
    chunk.Shape(1, 5, 3, 3, 8),
    chunk.Shape(2, 65, 2, 2, 16, -40.0),
    chunk.Shape(2, 65, 4, 8, 16, None),
]


def of_flashinfer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
    """The conventions of FlashInfer's function: packed rows, decay factors, q and k as they come."""
    assert all(x.ndim == 3 and x.is_contiguous() and not x.requires_grad for x in (q, k, v))
    assert given["g"].dtype == given["beta"].dtype == torch.float32
    assert all(given[name].is_contiguous() and not given[name].requires_grad for name in ("g", "beta"))
    assert given["cu_seqlens"].dtype == torch.int64
    q, k, v, g, beta = (x[None].double() for x in (q, k, v, given["g"].log(), given["beta"]))
    o, _ = torch_chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=given["cu_seqlens"])
    return o[0].bfloat16()


@pytest.mark.parametrize("shape", SHAPES)
def test_flashinfer_has_the_forward_pass_only(monkeypatch: pytest.MonkeyPatch, shape: chunk.Shape) -> None:
    of_flashinfer.__name__ = "chunk_gated_delta_rule"
    install(monkeypatch, "flashinfer.gdn_prefill", of_flashinfer)
    row = chunk.measure(shape.labels() | {"impl": "flashinfer"}, OPTIONS)
    assert row["rel_error"] < 0.01
    assert (row["norm"], row["fwd_ms"], row["fwd_graph_ms"]) == ("outside", 1.0, 1.0)
    assert not {"error", "fwdbwd_ms", "peak_gib"} & set(row)


def test_the_mix_of_gates_is_that_of_its_name() -> None:
    shape = SHAPES[-1]
    assert chunk.Shape.of(shape.labels()) == shape
    g = chunk.make(shape)[0][3].detach()
    assert [head.item() for head in (g == 0).all(dim=(0, 1))] == 2 * [True, False, False, False]
    others = g[..., [1, 2, 3, 5, 6, 7]]
    assert -0.5 < others.min() < others.max() < 0
    assert others.mean().item() == pytest.approx(-0.806 / 16, rel=0.1)  # E[log(1 + exp(-x))] of a normal x
