"""Attention over window and sinks, in PyTorch and by Triton, against its definition in float64, and its hazards."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deltanet_kernels import window_attention
from deltanet_kernels.window.attention import Kept, OtherForm, Upstream, window_backward, window_forward
from deltanet_kernels.window.calls import WindowCall
from deltanet_kernels.window.reference import naive_window_attention
from support.refusals import assert_refused
from tests.kernels.cases import assert_close, assert_repeats
from tests.kernels.triton_mode import DEVICE, GPU, by_pytorch, by_triton
from tests.kernels.window_cases import CASES, Case, make, results, truth

TILES = [
    *(case for case in CASES if not case.name.startswith("T=")),
    *(Case(f"T={T}", T=T, window=32, sinks=4, HQ=1) for T in (1, 31, 32, 33, 36, 64, 65, 96, 97)),
    Case("few chunks", T=60, window=20, sinks=4, HQ=3),  # each query head by a program of its own, in gradients of keys
    Case("many chunks", T=270, window=50, sinks=4, D=8),
    Case("many chunks, packed", T=250, window=30, sinks=20, D=8, cu_seqlens=(0, 5, 210, 211, 211, 240)),
]
# PyTorch has no tiles, Triton in float32 those of 32 tokens and 16 sinks: these take the code of other cases.
SIMILAR = {
    "window 2", "window 64", "window 65", "longer than the sequence", "more sinks than a tile", "nothing shared", "D=8",
    "D=40", "scale 0", "packed", "packed, many short", "packed, short and long", "edge, T=31",
}  # fmt: skip
TRITON = {"cap 2, packed", "T=31", "T=97", "as long as the sequence"}
PACKED = Case("packed", T=90, window=20, sinks=4, HQ=4, HK=2, cu_seqlens=(0, 0, 30, 80))
triton_window = by_triton(window_attention)
FORMS = {"pytorch": by_pytorch(window_attention), "triton": triton_window}
CHOSEN = [
    *(("pytorch", case) for case in CASES if case.name not in {*SIMILAR, "D=100"}),
    *(("triton", case) for case in TILES if GPU or case.name not in SIMILAR | TRITON),
]
every_form = pytest.mark.parametrize("form", FORMS)


@pytest.mark.parametrize(("form", "case"), CHOSEN, ids=str)
def test_results_and_gradients(form: str, case: Case) -> None:
    inputs = make(case, torch.float32, DEVICE)
    assert_close(results(FORMS[form], inputs), truth(inputs), 2e-6 * case.condition)


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


@every_form
@pytest.mark.parametrize("upstream", ["o", "lse"])
def test_gradients_of_one_output(form: str, upstream: str) -> None:
    inputs = make(PACKED, torch.float32, DEVICE)
    assert_close(results(FORMS[form], inputs, upstream), truth(inputs, upstream), 2e-6)


@pytest.mark.parametrize(
    ("form", "dtype", "case"),
    [  # the interpreter computes rightly in float16 only
        ("pytorch", torch.bfloat16, Case("", T=150, window=20, sinks=4)),
        ("triton", torch.float16, PACKED),
        ("triton", torch.float16, Case("rows", T=150, window=20, sinks=40, B=2, D=20, softcap=2.0)),
    ],
    ids=str,
)
def test_16_bits_are_computed_in_float32(form: str, dtype: torch.dtype, case: Case) -> None:
    inputs = make(case, dtype, DEVICE)
    found = results(FORMS[form], inputs)
    assert found["lse"].dtype == torch.float32
    assert_close(found, truth(inputs), torch.finfo(dtype).eps)


def test_float64() -> None:
    for case in (PACKED, dataclasses.replace(PACKED, softcap=1.5)):
        inputs = make(case, torch.float64, "cpu")
        assert_close(results(window_attention, inputs), truth(inputs), 1e-12)


@every_form
def test_packed_sequences_are_apart(form: str) -> None:
    """Each sequence gives what it gives alone, and tokens after the last one reach nothing, be they NaN."""
    inputs = make(PACKED, torch.float32, DEVICE)
    wanted = truth(inputs, "o")
    for name in ("q", "k", "v"):
        inputs[name].data[:, 80:] = torch.nan
    found = results(FORMS[form], inputs, "o")
    assert_close(found, wanted, 2e-6)
    for start, stop in ((0, 30), (30, 80)):
        alone = {name: inputs[name].detach()[:, start:stop] for name in ("q", "k", "v")}
        o, lse = FORMS[form](**(inputs | alone | {"cu_seqlens": None}))
        torch.testing.assert_close(found["o"][:, start:stop], o)
        torch.testing.assert_close(found["lse"][:, start:stop], lse)
    assert all((x[:, 80:] == 0).all() for x in found.values())


def test_a_capped_score_keeps_its_digits() -> None:
    """One key each for 200 queries, so that lse is the capped score, from far below the cap to far above it."""
    for cap, factor in itertools.product((1e-3, 1.0, 50.0), (1.0, 1e-3, 1e3)):
        s = torch.linspace(-3.0, 3.0, 200, dtype=torch.float64) * cap * factor
        q = s.float().to(DEVICE).view(1, -1, 1, 1)
        one = torch.ones_like(q)
        _, lse = triton_window(q=q, k=one, v=one, window=1, sinks=0, scale=1.0, softcap=cap)
        wanted = cap * (q.double() / cap).tanh()
        torch.testing.assert_close(lse.double(), wanted[..., 0], rtol=1e-6, atol=0.0)


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
    ("q", lambda x: x[:, :, :3], "q: got 3 heads, needs a multiple of the 2 heads of k"),
    ("k", lambda x: x.half(), "k: got dtype torch.float16, needs torch.float32"),
    ("k", lambda x: x[:, 1:], r"k: got shape .*\[B, T, HK, D\] = \[1, 90, HK, 16\]"),
    ("v", lambda x: x[..., 1:], r"v: got shape .* = \[1, 90, 2, 16\]"),
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
    ("cu_seqlens", lambda x: x * 2, "cu_seqlens: got a last offset of 160, needs at most T = 90"),
]


def test_wrong_arguments_are_named() -> None:
    x = make(PACKED, torch.float32, "cpu")
    rows = [(x | {name: change(x[name])}, (ValueError, TypeError), message) for name, change, message in WRONG]
    assert_refused(window_attention, rows)


# On the GPU only.


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
