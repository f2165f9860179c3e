"""Sequences cut into segments give the results of the recurrence, whatever their heads forget.

Float32, chunks of 32 tokens. Segments that remember are processed sequentially or composed (segments.py); both are
tested here.
"""

import math
from typing import Any

import pytest
import torch

from deltanet_kernels.common.sequences import cut_chunks
from deltanet_kernels.gated_delta_rule import chunk_forward
from deltanet_kernels.gated_delta_rule.row_factors import ChunkInputs
from deltanet_kernels.gated_delta_rule.scores import scores
from deltanet_kernels.gated_delta_rule.segments import chunk_spans
from tests.kernels.cases import Case, assert_close, make_inputs, relative_error, results, truth
from tests.kernels.triton_mode import DEVICE, triton_chunk

pytestmark = pytest.mark.usefixtures("poisoned_memory")
C = 32


@pytest.fixture(params=[False, True], ids=["sequential", "composed"])
def remembering(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The treatment of segments that remember."""
    monkeypatch.setattr(chunk_forward, "composes", lambda segments, K: segments > 1 and request.param)


def uniform(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(2))


def fast(g: torch.Tensor) -> torch.Tensor:
    """About -208 per chunk: one or two chunks of warm-up. In eighths, so that float32 adds them up exactly."""
    return -(104 * uniform(*g.shape)).round() / 8


def one_fast_head(g: torch.Tensor) -> torch.Tensor:
    return torch.cat([fast(g[..., :1]), g[..., 1:]], -1)


def one_fast_segment(g: torch.Tensor) -> torch.Tensor:
    third = g.shape[1] // 3
    return torch.cat([g[:, :third], fast(g[:, :third]), g[:, 2 * third :]], 1)


def closed_tokens(g: torch.Tensor) -> torch.Tensor:
    """One token of each segment forgets everything before it, inside a chunk."""
    g = g.clone()
    g[:, 40::64] = -torch.inf
    return g


def within_a_chunk(g: torch.Tensor) -> torch.Tensor:
    """All of the decay on four tokens in the middle of a chunk, nothing elsewhere: tokens of that chunk count in full
    at both ends of the segment, so that a warm-up that leaves it out is wrong by as much as they are."""
    g = torch.zeros_like(g)
    for token in range(12, 16):
        g[:, C + token :: 3 * C] = -60.0
    return g


def with_gates(case: Case, gates: Any) -> dict[str, Any]:
    inputs = make_inputs(case, torch.float32, DEVICE)
    return inputs | {"g": gates(inputs["g"].detach().cpu()).to(DEVICE).requires_grad_()}


def segmented(**inputs: Any) -> Any:
    return triton_chunk(**inputs, segments=3)


@pytest.mark.usefixtures("remembering")
@pytest.mark.parametrize("gates", [fast, one_fast_head, one_fast_segment, closed_tokens, torch.zeros_like, torch.clone])
def test_segments_are_exact(gates: Any) -> None:
    """Forward and every gradient, among them those of the initial state."""
    inputs = with_gates(Case("segments", T=6 * C - 5, HV=2 if gates is one_fast_head else 1), gates)
    assert_close(results(segmented, inputs), truth(inputs), 3e-6)


@pytest.mark.usefixtures("remembering")
def test_a_shorter_warm_up_would_show() -> None:
    inputs = with_gates(Case("warm-up", T=9 * C), within_a_chunk)
    found = results(segmented, inputs)
    assert_close(found, truth(inputs), 3e-6)
    whole = results(lambda **x: triton_chunk(**x, segments=1), inputs)
    assert all(torch.equal(found[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    "case",
    [
        Case("rows, no state", T=100, B=2, HV=2, HQ=1, initial_state=False),
        Case("packed", T=200, H=1, HQ=2, cu_seqlens=(0, 0, 1, 130, 135, 190)),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("gates", "remembering"),
    [
        pytest.param(fast, False, id="fast"),
        pytest.param(fast, True, id="fast-composed", marks=pytest.mark.slow),  # nothing remembers
        pytest.param(torch.clone, False, id="clone-sequential"),
        pytest.param(torch.clone, True, id="clone-composed"),
    ],
    indirect=["remembering"],
)
def test_segments_of_other_calls(case: Case, gates: Any, remembering: None) -> None:
    inputs = with_gates(case, gates)
    assert_close(results(segmented, inputs), truth(inputs), 3e-6)


def test_segments_with_raw_gates() -> None:
    """The gradients of `A_log` and `dt_bias` are sums over tokens, of terms that are 12 times the first head's sums."""
    inputs = make_inputs(Case("raw gates", T=70, H=2, raw=True), torch.float32, DEVICE)
    found, wanted = results(segmented, inputs), truth(inputs)
    sums = {name: (found.pop(name), wanted.pop(name)) for name in ("dA_log", "ddt_bias")}
    assert_close(found, wanted, 3e-6)
    for one, other in sums.values():
        assert relative_error(one, other) < 12 * 3e-6


@pytest.mark.parametrize("gates", [fast, one_fast_segment])
def test_gradient_of_only_the_final_state(gates: Any) -> None:
    inputs = with_gates(Case("final", T=6 * C), gates)
    found = results(segmented, inputs, ("final_state",))
    assert_close(found, truth(inputs, ("final_state",)), 3e-6)


def test_gates_that_only_hold_growth_down_do_not_forget() -> None:
    """Equal long keys with beta |k|^2 = 1 + e^4 turn the state round: e^-4 (1 - beta |k|^2) = -1, for ever."""
    inputs = with_gates(Case("growth", T=192, l2norm=False), lambda g: torch.full_like(g, -4.0))
    key = inputs["k"].detach()[:, :1]
    inputs["beta"] = torch.ones_like(inputs["beta"]).requires_grad_()
    inputs["k"] = (key / key.norm() * math.sqrt(1 + math.exp(4))).repeat(1, 192, 1, 1).requires_grad_()
    found = results(segmented, inputs)
    assert_close(found, truth(inputs), 15e-6)  # a reflection per token, as with beta = 2 on equal keys


def test_no_chunk_keeps_more_than_its_bound() -> None:
    """No chunk's map is longer than its bound, and the bound is no looser than the norms of its factors."""
    torch.manual_seed(0)
    T, K, HV = 3 * C, 8, 2
    k, q = torch.randn(2, 1, T, 1, K)
    g, beta = -2 * torch.rand(1, T, HV), 2 * torch.rand(1, T, HV)
    g[:, 70, 1] = -200.0
    chunks = cut_chunks(1, T, C, None)
    inputs = [x.to(DEVICE) for x in (q, k, g, beta)]
    *_, bounds = scores(ChunkInputs(*inputs, None, None, chunks, 1.0, False, False, True), False, "ieee", 4)
    lengths = [(1 - beta[0, :, h] * k[0, :, 0].square().sum(-1)).abs().clamp(min=1).log() for h in range(HV)]
    wanted = g[0].T + torch.stack(lengths)
    wanted[1, 70] = -torch.inf
    torch.testing.assert_close(bounds.cpu(), wanted.unflatten(1, (3, C)).sum(-1).T, rtol=1e-5, atol=1e-4)
    for c in range(3):
        for h in range(HV):
            M = torch.eye(K, dtype=torch.float64)
            for t in range(c * C, (c + 1) * C):
                key = k[0, t, 0].double()
                M = g[0, t, h].double().exp() * (M - beta[0, t, h] * torch.outer(key, key @ M))
            if bounds[c, h] > -torch.inf:
                assert torch.linalg.matrix_norm(M, 2).log() <= bounds[c, h] + 1e-4


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("composed", [False, True])
def test_spans_are_as_short_as_the_bounds_allow(bad: float, composed: bool) -> None:
    """Two segments of 600 chunks: 400 are enough at -0.5 per chunk, 67 at -3, all are not at -0.25."""
    share = 600
    bounds = torch.full((4 * share, 2), -0.5)
    bounds[:share, 1] = -0.25
    bounds[share : 2 * share, 1] = -3.0
    bounds[2 * share + 500, 0] = bad
    bounds[2 * share : 3 * share, 1] = -3.0
    bounds[2 * share + 20, 1] = -torch.inf
    bounds[2 * share + 595, 1] = 900.0  # 4 chunks of -3 behind it, and 363 before it
    found = chunk_spans(bounds.to(DEVICE), cut_chunks(2, 2 * share * C - 1, C, None), 2, composed).tolist()
    idle, first, second, both = [1, 0], [0, 600], [600, 1200], [0, 1200]
    # Per head and segment: WALK, WALK_BACK, N_PASS, N_BACK, M_PASS.
    assert found[0][0] == [[first, first, [200, 600], idle, idle], [second, second, idle, [600, 1000], idle]]
    assert found[1][1] == [[first, first, [232, 600], idle, idle], [second, second, idle, [600, 1000], idle]]
    for remembers, behind in ((found[0][1], 667), (found[1][0], 1000)):
        if composed:
            wanted = [[first, first, first, idle, first], [second, second, idle, [600, behind], idle]]
        else:
            wanted = [[both, first, idle, idle, idle], [idle, second, idle, [600, behind], idle]]
        assert remembers == wanted


def test_what_is_forgotten_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """M is computed of segments that remember, where they are composed; nothing else writes it."""
    inputs = with_gates(Case("fresh memory", T=192, HV=2), one_fast_segment)
    tensors = [inputs[name].detach() for name in ("q", "k", "v", "g", "beta", "initial_state")]
    tensors[3][..., 1] = -16.0
    monkeypatch.setattr(chunk_forward, "composes", lambda segments, K: True)
    form = (None, None, None, 1.0, True, False, True, True, "ieee", 3, "decayed")
    *_, M, _ = torch.ops.deltanet.chunk_forward(*tensors, *form)
    assert M[0].isfinite().all(-1).all(-1).tolist() == [[True, False], [False, False], [True, False]]
