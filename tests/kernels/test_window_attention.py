"""Attention over window and sinks in PyTorch against its definition in float64: results, gradients, memory, errors."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deltanet_kernels import window_attention
from deltanet_kernels.window.reference import naive_window_attention
from support.refusals import assert_refused
from tests.kernels.cases import assert_close
from tests.kernels.window_cases import CASES, Case, make, results, truth

PACKED = Case("packed", T=60, window=8, sinks=2, HQ=4, HK=2, cu_seqlens=(0, 0, 17, 50))


# PyTorch has no tiles: sizes that choose those of the kernels, and what is a part of another case.
SIMILAR = {
    "window 2", "window 64", "window 65", "longer than the sequence", "more sinks than a tile", "nothing shared", "D=8",
    "D=40", "D=100", "scale 0", "packed", "packed, many short", "packed, short and long", "edge, T=31",
}  # fmt: skip


@pytest.mark.parametrize("case", [case for case in CASES if case.name not in SIMILAR], ids=str)
def test_results_and_gradients(case: Case) -> None:
    inputs = make(case, torch.float32, "cpu")
    assert_close(results(window_attention, inputs), truth(inputs), 2e-6 * case.condition)


def test_the_definition_is_softmax_attention_with_a_mask() -> None:
    """Query 5 of a window of 2 beside 1 sink sees tokens 0, 4 and 5; a capped score s becomes 2 tanh(s / 2)."""
    for cap in (None, 2.0):
        inputs = make(Case("", T=6, window=2, sinks=1, HQ=1, softcap=cap), torch.float64, "cpu")
        q, k, v = (inputs[name].detach()[0, :, 0] for name in ("q", "k", "v"))
        scores = (k[[0, 4, 5]] @ q[5]) / 4
        scores = scores if cap is None else 2 * (scores / 2).tanh()
        o, lse = naive_window_attention(**inputs)
        torch.testing.assert_close(o[0, 5, 0], scores.softmax(0) @ v[[0, 4, 5]])
        torch.testing.assert_close(lse[0, 5, 0], scores.logsumexp(0))


def test_low_precision_is_computed_in_float32() -> None:
    dtype = torch.bfloat16
    inputs = make(Case("", T=150, window=20, sinks=4), dtype, "cpu")
    found = results(window_attention, inputs)
    assert found["lse"].dtype == torch.float32
    assert_close(found, truth(inputs), torch.finfo(dtype).eps)


def test_float64() -> None:
    for case in (PACKED, dataclasses.replace(PACKED, softcap=1.5)):
        inputs = make(case, torch.float64, "cpu")
        assert_close(results(window_attention, inputs), truth(inputs), 1e-12)


@pytest.mark.parametrize("upstream", ["o", "lse"])
def test_gradients_of_one_output(upstream: str) -> None:
    inputs = make(PACKED, torch.float32, "cpu")
    assert_close(results(window_attention, inputs, upstream), truth(inputs, upstream), 2e-6)


def test_packed_sequences_are_apart() -> None:
    """Each sequence gives what it gives alone, and tokens after the last one reach nothing, be they NaN."""
    inputs = make(PACKED, torch.float32, "cpu")
    for name in ("q", "k", "v"):
        inputs[name].data[:, 50:] = torch.nan
    found = results(window_attention, inputs, "o")
    for start, stop in ((0, 17), (17, 50)):
        alone = {name: inputs[name].detach()[:, start:stop] for name in ("q", "k", "v")}
        o, lse = window_attention(**(inputs | alone | {"cu_seqlens": None}))
        torch.testing.assert_close(found["o"][:, start:stop], o)
        torch.testing.assert_close(found["lse"][:, start:stop], lse)
    for x in found.values():
        assert (x[:, 50:] == 0).all()
        assert x.isfinite().all()


def test_memory_is_not_quadratic() -> None:
    """The largest tensor that a call makes grows with the tokens, not with their square."""
    largest = []
    for T in (512, 2048):
        inputs = make(Case("", T=T, window=20, sinks=4), torch.float32, "cpu")
        with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            results(window_attention, inputs)
        largest.append(max(event.cpu_memory_usage for event in profile.events()))
    assert largest[1] < 5 * largest[0]


def test_compile_without_a_graph_break() -> None:
    inputs = make(PACKED, torch.float32, "cpu")
    compiled = torch.compile(window_attention, fullgraph=True, backend="aot_eager")
    found, wanted = results(compiled, inputs), results(window_attention, inputs)
    assert_close(found, wanted, 1e-6)


WRONG: list[tuple[str, Callable[[Any], Any], str]] = [
    ("q", lambda x: x[0], r"q: got shape .*needs \[B, T, HQ, D\]"),
    ("q", lambda x: x[:, :0], r"q: got shape .*without empty dimensions"),
    ("q", lambda x: x[:, :, :3], "q: got 3 heads, needs a multiple of the 2 heads of k"),
    ("q", lambda x: x.long(), "q: got dtype torch.int64"),
    ("q", lambda x: "q", "q: got str, needs a tensor"),
    ("k", lambda x: x.half(), "k: got dtype torch.float16, needs torch.float32"),
    ("k", lambda x: x[:, 1:], r"k: got shape .*\[B, T, HK, D\] with B, T and D of q = \[1, 60, 2, 16\]"),
    ("v", lambda x: x[..., 1:], "v: got shape .*the shape of k"),
    ("v", lambda x: x.to("meta"), "v: got device meta"),
    ("window", lambda x: 0, "window: got 0, needs at least 1"),
    ("window", lambda x: 2.0, "window: got float, needs int"),
    ("sinks", lambda x: -1, "sinks: got -1, needs at least 0"),
    ("sinks", lambda x: True, "sinks: got bool, needs int"),
    ("softcap", lambda x: 0.0, "softcap: got 0.0, needs a finite number above 0, or None"),
    ("softcap", lambda x: math.nan, "softcap: got nan, needs a finite number"),
    ("softcap", lambda x: math.inf, "softcap: got inf, needs a finite number"),
    ("softcap", lambda x: "50", "softcap: got str, needs a float or None"),
    ("cu_seqlens", lambda x: x.float(), "cu_seqlens: got dtype"),
    ("cu_seqlens", lambda x: x + 1, "cu_seqlens: got a first offset of 1"),
    ("cu_seqlens", lambda x: x * 2, "cu_seqlens: got a last offset of 100, needs at most T = 60"),
]


def test_wrong_arguments_are_named() -> None:
    x = make(PACKED, torch.float32, "cpu")
    rows = [(x | {name: change(x[name])}, (ValueError, TypeError), message) for name, change, message in WRONG]
    assert_refused(window_attention, rows)
