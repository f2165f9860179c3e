"""The opt-in search: what it chooses, what it rejects, and that it does not run where it cannot time."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from deltanet_kernels.common.device import capability
from deltanet_kernels.gated_delta_rule import autotune
from deltanet_kernels.gated_delta_rule.config import ChunkConfig, chunk_config
from tests.kernels.cases import Case, make_inputs, results
from tests.kernels.triton_mode import triton_chunk

PINNED = chunk_config(128, 128, torch.bfloat16, (9, 0))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "_chosen", {})


def search(run: Callable[[ChunkConfig], torch.Tensor], times: Callable[[ChunkConfig], float]) -> ChunkConfig:
    """`choose` with a `run` and a clock that depend on the configuration under trial."""

    def tried() -> ChunkConfig:
        return autotune.choose("key", PINNED, lambda: [], lambda _: 0.0)

    return autotune.choose("key", PINNED, lambda: [run(tried())], lambda _: times(tried()))


def test_candidates_start_with_the_pinned_one_and_keep_the_chunk() -> None:
    found = autotune.candidates(PINNED)
    assert found[0] == PINNED
    assert len(found) == len(set(found)) >= 5
    assert {config.C for config in found} == {PINNED.C}


def test_the_fastest_is_kept() -> None:
    calls = []

    def run(config: ChunkConfig) -> torch.Tensor:
        calls.append(config)
        return torch.ones(2)

    wanted = replace(PINNED, input_BV=32)
    assert search(run, lambda config: 1.0 if config == wanted else 2.0) == wanted
    count = len(calls)
    assert search(run, lambda config: 0.0) == wanted
    assert len(calls) == count


def test_a_candidate_that_fails_or_errs_or_wavers_is_refused() -> None:
    fails, wrong, wavers = autotune.candidates(PINNED)[1:4]
    turns = iter(range(100))

    def run(config: ChunkConfig) -> torch.Tensor:
        if config == fails:
            raise RuntimeError("out of resources")
        if config == wavers:
            return torch.ones(2) + 1e-3 * next(turns)
        return torch.full((2,), torch.nan) if config == wrong else torch.ones(2)

    assert search(run, lambda config: 1.0 if config in (fails, wrong, wavers) else 2.0) == PINNED


def test_nothing_is_tried_under_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    def run(config: ChunkConfig) -> torch.Tensor:
        raise AssertionError("tried")

    assert search(run, lambda config: 1.0) == PINNED
    assert autotune._chosen == {}


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("0", False), ("", False)])
def test_only_1_asks_for_it(monkeypatch: pytest.MonkeyPatch, value: str, wanted: bool) -> None:
    monkeypatch.setenv("DELTANET_AUTOTUNE", value)
    assert autotune.enabled() is wanted


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_search_with_its_own_clock_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(Case("grouped", T=128, H=1, HV=2, K=64), torch.bfloat16, "cuda")
    pinned = results(triton_chunk, inputs)
    monkeypatch.setenv("DELTANET_AUTOTUNE", "1")
    for _ in range(2):
        for name, x in results(triton_chunk, inputs).items():
            assert (x - pinned[name]).norm() <= autotune.TOLERANCE * pinned[name].norm(), name
    (found,) = autotune._chosen.values()
    config = chunk_config(64, 64, torch.bfloat16, capability(torch.device("cuda", 0)))
    assert found in autotune.candidates(config)
