"""The kernels of the attention over window and sinks against its definition in float64, and their hazards."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from deltanet_kernels import window_attention
from deltanet_kernels.window.attention import (
    Kept,
    OtherForm,
    Upstream,
    window_attention_triton,
    window_backward,
    window_forward,
)
from deltanet_kernels.window.calls import WindowCall
from tests.kernels.cases import assert_close, assert_repeats
from tests.kernels.triton_mode import DEVICE, GPU
from tests.kernels.window_cases import CASES, Case, make, results, truth

TILES = [
    *(case for case in CASES if not case.name.startswith("T=")),
    *(Case(f"T={T}", T=T, window=32, sinks=4, HQ=1) for T in (1, 31, 32, 33, 36, 64, 65, 96, 97)),
    Case("few chunks", T=60, window=20, sinks=4, HQ=3),  # each query head by a program of its own, in gradients of keys
    Case("many chunks", T=270, window=50, sinks=4, D=8),
    Case("many chunks, packed", T=250, window=30, sinks=20, D=8, cu_seqlens=(0, 5, 210, 211, 211, 240)),
]
# In float32 tiles are of 32 tokens and 16 sinks, and these take the code of other cases.
SIMILAR = {
    "window 2", "window 64", "window 65", "longer than the sequence", "more sinks than a tile", "nothing shared", "D=8",
    "D=40", "scale 0", "cap 2, packed", "packed", "packed, many short", "packed, short and long", "T=31", "T=97",
    "as long as the sequence", "edge, T=31",
}  # fmt: skip
CHOSEN = [case for case in TILES if GPU or case.name not in SIMILAR]
PACKED = Case("packed", T=90, window=20, sinks=4, HQ=4, HK=2, cu_seqlens=(0, 0, 30, 80))


def triton_window(**inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return window_attention_triton(WindowCall(**inputs))


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_results_and_gradients(case: Case) -> None:
    inputs = make(case, torch.float32, DEVICE)
    assert_close(results(triton_window, inputs), truth(inputs), 2e-6 * case.condition)


@pytest.mark.parametrize("upstream", ["o", "lse"])
def test_gradients_of_one_output(upstream: str) -> None:
    inputs = make(PACKED, torch.float32, DEVICE)
    assert_close(results(triton_window, inputs, upstream), truth(inputs, upstream), 2e-6)


def test_a_capped_score_keeps_its_digits() -> None:
    """One key each for 200 queries, so that lse is the capped score, from far below the cap to far above it."""
    for cap, factor in itertools.product((1e-3, 1.0, 50.0), (1.0, 1e-3, 1e3)):
        s = torch.linspace(-3.0, 3.0, 200, dtype=torch.float64) * cap * factor
        q = s.float().to(DEVICE).view(1, -1, 1, 1)
        one = torch.ones_like(q)
        _, lse = triton_window(q=q, k=one, v=one, window=1, sinks=0, scale=1.0, softcap=cap)
        wanted = cap * (q.double() / cap).tanh()
        torch.testing.assert_close(lse.double(), wanted[..., 0], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("case", [PACKED, Case("rows", T=150, window=20, sinks=40, B=2, D=20, softcap=2.0)], ids=str)
def test_float16(case: Case) -> None:
    inputs = make(case, torch.float16, DEVICE)
    found = results(triton_window, inputs)
    assert found["lse"].dtype == torch.float32
    assert_close(found, truth(inputs), torch.finfo(torch.float16).eps)


def test_no_element_is_left_out(poisoned_memory: None) -> None:
    for case in (PACKED, Case("rows", T=90, window=20, sinks=17, B=2, D=20)):
        inputs = make(case, torch.float32, DEVICE)
        assert_close(results(triton_window, inputs), truth(inputs), 2e-6)


def test_strided_and_expanded_inputs() -> None:
    """Heads before tokens, as models keep them; one key for all heads; a gradient that is one number."""
    inputs = make(Case("strided", T=24, window=8, sinks=4, B=2, HQ=4, HK=2), torch.float32, DEVICE)
    wanted = truth(inputs, "o")
    layouts = {
        "heads first": {name: inputs[name].detach().transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"},
        "channels apart": {name: inputs[name].detach().transpose(1, 3).contiguous().transpose(1, 3) for name in "qkv"},
    }
    for layout in layouts.values():
        own = {name: x.requires_grad_() for name, x in layout.items()}
        assert not own["q"].is_contiguous()
        assert_close(results(triton_window, inputs | own, "o"), wanted, 2e-6)
    one = inputs["k"].detach()[:, :, :1].expand(-1, -1, 2, -1).requires_grad_()
    assert_close(results(triton_window, inputs | {"k": one}, "o"), truth(inputs | {"k": one}, "o"), 2e-6)
    sums = [torch.autograd.grad(f(**inputs)[0].sum(), inputs["v"])[0] for f in (triton_window, window_attention)]
    torch.testing.assert_close(*sums)


def test_tokens_after_the_last_sequence_reach_nothing() -> None:
    inputs = make(PACKED, torch.float32, DEVICE)
    wanted = truth(inputs, "o")
    for name in ("q", "k", "v"):
        inputs[name].data[:, 80:] = torch.nan
    assert_close(results(triton_window, inputs, "o"), wanted, 2e-6)


@pytest.mark.parametrize("offsets", [None, (0, 10, 29)], ids=["rows", "packed"])
def test_the_operators_are_registered_consistently(offsets: tuple[int, ...] | None) -> None:
    inputs = make(Case("", T=30, window=8, sinks=2, cu_seqlens=offsets), torch.float32, DEVICE)
    call = WindowCall(*(inputs[name] for name in ("q", "k", "v")), 8, 2, 0.25, inputs["cu_seqlens"], 3.0, 32)
    torch.library.opcheck(window_forward.op, call)
    o, lse = (x.detach() for x in triton_window(**inputs))
    upstream, kept = Upstream(torch.ones_like(o), torch.ones_like(lse)), Kept(o, lse)
    call = call._replace(**{name: inputs[name].detach() for name in ("q", "k", "v")})
    torch.library.opcheck(window_backward.op, (*upstream, *call, *kept, *OtherForm()))


def test_one_run_gives_the_bits_of_the_next() -> None:
    case = Case("", T=70, window=20, sinks=4)
    if GPU:
        case = Case("", T=2000, window=100, sinks=4, B=4, HQ=8, HK=2, D=64)
    inputs = make(case, torch.float32, DEVICE)
    assert_repeats(lambda: results(triton_window, inputs), 20 if GPU else 1)


@pytest.mark.gpu
@pytest.mark.parametrize("case", TILES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(case: Case, dtype: torch.dtype) -> None:
    inputs = make(case, dtype, DEVICE)
    assert_close(results(triton_window, inputs), truth(inputs), torch.finfo(dtype).eps * case.condition)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [16, 40, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("window", "sinks"), [(64, 4), (256, 4), (100, 33), (1, 1)])
def test_every_head_size_repeats(D: int, dtype: torch.dtype, window: int, sinks: int) -> None:
    """Right, and the same bits in ten runs: what a compiler's fault, or a race, would change."""
    case = Case("", T=600, window=window, sinks=sinks, B=2, HQ=6, HK=2, D=D)
    packed = dataclasses.replace(case, B=1, cu_seqlens=(0, 3, 400, 400, 590))
    bound = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    for each in (case, packed):
        inputs = make(each, dtype, DEVICE)
        assert_close(results(triton_window, inputs), truth(inputs), bound)
        assert_repeats(lambda inputs=inputs: results(triton_window, inputs), 10)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [16, 64, 128, 256])
def test_exact_inputs_give_exact_sums(D: int) -> None:
    """With equal scores and integer values every sum is exact, so that no product may lose or double a token."""
    case = Case("", T=500, window=64, sinks=4, B=2, HQ=4, HK=2, D=D)
    inputs = make(case, torch.bfloat16, DEVICE) | {"scale": 0.0}
    inputs["v"].data = torch.randint(-4, 5, inputs["v"].shape, device=DEVICE).bfloat16()
    o, lse = triton_window(**inputs)
    count = (torch.arange(case.T, device=DEVICE) + 1).clamp(max=64).float()
    count += (torch.arange(case.T, device=DEVICE) - 63).clamp(0, 4)
    torch.testing.assert_close(lse, count.log()[None, :, None].expand_as(lse), atol=1e-6, rtol=1e-6)
    wanted = truth(inputs)["o"] * count[:, None, None]
    error = (o.double() * count[:, None, None] - wanted).abs().max()
    assert error < 0.5 + wanted.abs().max() * torch.finfo(torch.bfloat16).eps


@pytest.mark.gpu
def test_a_graph_replays() -> None:
    inputs = make(PACKED, torch.bfloat16, DEVICE)
    q, k, v = (inputs[name].detach() for name in ("q", "k", "v"))
    call = inputs | {"q": q, "k": k, "v": v}
    wanted = triton_window(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = triton_window(**call)
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    """B T HQ D exceeds 2^31: the last row gives what it gives alone."""
    B, T, HQ, D = 9, 16384, 64, 256
    q = torch.randn(1, T, HQ, D, device=DEVICE, dtype=torch.bfloat16).expand(B, -1, -1, -1).contiguous()
    k, v = (torch.randn(1, T, 1, D, device=DEVICE, dtype=torch.bfloat16).expand(B, -1, -1, -1) for _ in range(2))
    o, lse = triton_window(q=q, k=k, v=v, window=64, sinks=4, scale=None, cu_seqlens=None)
    alone = triton_window(q=q[:1], k=k[:1], v=v[:1], window=64, sinks=4, scale=None, cu_seqlens=None)
    assert torch.equal(o[-1:], alone[0])
    assert torch.equal(lse[-1:], alone[1])


@pytest.mark.gpu
def test_the_gradient_takes_little_memory() -> None:
    """Less than three times the inputs and outputs, at any length."""
    for T, window in itertools.product((4096, 32768), (64, 512)):
        inputs = make(Case("", T=T, window=window, sinks=4, HQ=8, HK=8, D=64), torch.bfloat16, DEVICE)
        held = 4 * inputs["q"].numel() * 2
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        o, _ = triton_window(**inputs)
        torch.autograd.grad(o, [inputs[name] for name in ("q", "k", "v")], torch.ones_like(o))
        assert torch.cuda.max_memory_allocated() - before < 3 * held
