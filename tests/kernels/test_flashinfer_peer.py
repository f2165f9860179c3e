"""FlashInfer as a peer of the benchmark, with a module in its place: the call, the check of its results, its rows."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from deltanet_kernels import torch_chunk_gated_delta_rule
from measuring.kernels import chunk, flashinfer_prefill, harness

OPTIONS = argparse.Namespace(first_seconds=60.0, repeats=1)
SHAPES = [
    chunk.Shape(3, 70, 2, 4, 16),
    chunk.Shape(1, 5, 3, 3, 8),
    chunk.Shape(2, 65, 2, 2, 16, -40.0),
    chunk.Shape(2, 65, 4, 8, 16, None),
]


def stand_in(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
    """The conventions of FlashInfer's function: packed rows, decay factors, q and k as they come."""
    assert all(x.ndim == 3 and x.is_contiguous() and not x.requires_grad for x in (q, k, v))
    assert given["g"].dtype == given["beta"].dtype == torch.float32
    assert all(given[name].is_contiguous() and not given[name].requires_grad for name in ("g", "beta"))
    assert given["cu_seqlens"].dtype == torch.int64
    q, k, v, g, beta = (x[None].double() for x in (q, k, v, given["g"].log(), given["beta"]))
    o, _ = torch_chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=given["cu_seqlens"])
    return o[0].bfloat16()


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The benchmark with inputs on the CPU and a clock that only calls."""

    def timed(run: Callable[[], object], repeats: int = 20) -> float:
        run()
        return 1.0

    monkeypatch.setattr(chunk, "DEVICE", "cpu")
    for name in ("median_ms", "peak_gib", "call_without_waiting"):
        monkeypatch.setattr(harness, name, timed)
    monkeypatch.setattr(harness, "graph_us", lambda run, calls, repeats: 1e3 * timed(run))
    chunk.reference.cache_clear()
    yield
    chunk.reference.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, rule: Callable[..., torch.Tensor]) -> None:
    module = ModuleType("flashinfer.gdn_prefill")
    module.chunk_gated_delta_rule = rule  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.gdn_prefill", module)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_and_head_agrees(shape: chunk.Shape) -> None:
    leaves, _ = chunk.make(shape)
    o = flashinfer_prefill.forward(stand_in, *flashinfer_prefill.prepare(leaves))
    wanted, _ = torch_chunk_gated_delta_rule(*(x.double() for x in leaves), use_qk_l2norm_in_kernel=True)
    assert o.shape == wanted.shape
    assert (o - wanted).norm() < 0.01 * wanted.norm()


def labels(shape: chunk.Shape, impl: str = "flashinfer") -> dict[str, Any]:
    return {**shape.labels(), "impl": impl}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_row_has_the_forward_pass_only(monkeypatch: pytest.MonkeyPatch, shape: chunk.Shape) -> None:
    install(monkeypatch, stand_in)
    row = chunk.measure(labels(shape), OPTIONS)
    assert row["rel_error"] < 0.01
    assert (row["norm"], row["fwd_ms"], row["fwd_graph_ms"]) == ("outside", 1.0, 1.0)
    assert not {"error", "fwdbwd_ms", "peak_gib"} & set(row)


def test_the_mix_of_gates_is_that_of_its_name() -> None:
    shape = SHAPES[-1]
    assert chunk.Shape.of(labels(shape)) == shape
    g = chunk.make(shape)[0][3].detach()
    assert [head.item() for head in (g == 0).all(dim=(0, 1))] == 2 * [True, False, False, False]
    others = g[..., [1, 2, 3, 5, 6, 7]]
    assert -0.5 < others.min() < others.max() < 0
    assert others.mean().item() == pytest.approx(-0.806 / 16, rel=0.1)  # E[log(1 + exp(-x))] of a normal x


@pytest.mark.parametrize("wrong", [lambda o: 1.1 * o, lambda o: o.roll(1, 0), lambda o: o * torch.nan])
def test_wrong_results_are_not_timed(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Any]) -> None:
    install(monkeypatch, lambda *args, **given: wrong(stand_in(*args, **given)))
    row = chunk.measure(labels(SHAPES[0]), OPTIONS)
    assert row["error"] == "wrong results"
    assert "fwd_ms" not in row


def test_wrong_gradients_are_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def operator(q: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        q = q.detach() + 2 * (q - q.detach())
        return torch_chunk_gated_delta_rule(q, *others, use_qk_l2norm_in_kernel=True)[0]

    monkeypatch.setattr(chunk, "ours", operator)
    row = chunk.measure(labels(SHAPES[0], "deltanet"), OPTIONS)
    assert row["error"] == "backward: wrong results"
    assert "fwdbwd_ms" not in row
    assert row["rel_error"] == pytest.approx(1, abs=0.05)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.delitem(sys.modules, "flashinfer.gdn_prefill", raising=False)
    (row,) = written(monkeypatch, tmp_path)
    assert "flashinfer" in row["error"]
    assert "flashinfer" not in {row["impl"] for row in chunk.rows(False)}


def test_a_refusal_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: Any, **given: Any) -> torch.Tensor:
        raise RuntimeError("only supports D=128")

    install(monkeypatch, refuse)
    assert [row["error"] for row in written(monkeypatch, tmp_path)] == ["RuntimeError: only supports D=128"]


def written(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[dict[str, Any]]:
    """The rows of FlashInfer that the command writes for one shape."""
    monkeypatch.setattr(chunk, "SHAPES", SHAPES[:1])
    monkeypatch.setattr(harness, "_device_suffix", str)  # a file without the name of a GPU
    harness.run("chunk", chunk.BENCHMARK, ["--peers", "--only", "impl=flashinfer", "--output", str(folder)])
    return json.loads((folder / "chunk.json").read_text())["rows"]
