"""The decoding step of the attention over window and sinks: one by one against the definition, in place."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from deltanet_kernels import window_step_
from deltanet_kernels.window.calls import WindowStepCall
from deltanet_kernels.window.reference import naive_window_attention
from deltanet_kernels.window.step import window_step_op_, window_step_triton_
from support.refusals import assert_refused
from tests.kernels.cases import relative_error
from tests.kernels.test_step import rotate
from tests.kernels.triton_mode import DEVICE

Results = tuple[torch.Tensor, torch.Tensor]  # o [B, T, HQ, D], lse [B, T, HQ]
StepFunction = Callable[..., Results]
CACHE = ("keys", "values", "numbers", "count")


@dataclass(frozen=True)
class Step:
    """A sequence of T tokens per row, given one by one."""

    name: str
    T: int
    window: int
    sinks: int
    B: int = 2
    HQ: int = 4
    HK: int = 2
    D: int = 16
    padding: tuple[int, ...] | None = None  # tokens of padding before each row
    scale: float | None = None
    softcap: float | None = None
    rope: int = 0  # channels that turn
    positions: int = 1  # rows of cos and sin

    def __str__(self) -> str:
        return self.name


CASES = [
    Step("window and sinks", T=16, window=5, sinks=3),
    Step("no sinks", T=12, window=5, sinks=0),
    Step("window 1", T=10, window=1, sinks=2),
    Step("window 1, no sinks", T=5, window=1, sinks=0),
    Step("nothing leaves", T=10, window=20, sinks=4),
    Step("more sinks than the window", T=20, window=3, sinks=12),
    Step("padding on the left", T=16, window=5, sinks=3, B=3, padding=(0, 7, 16)),
    Step("many places", T=6, window=300, sinks=4),
    Step("one head", T=12, window=5, sinks=3, HQ=1, HK=1, scale=-0.3),
    Step("three queries per key", T=12, window=5, sinks=3, HQ=6),
    Step("eight queries per key", T=12, window=5, sinks=3, HQ=8, HK=1, B=1),
    Step("seven queries per key, one row", T=12, window=5, sinks=3, HQ=7, HK=1, B=1),
    Step("cap 0.5", T=12, window=5, sinks=3, softcap=0.5),
    Step("cap 50", T=12, window=5, sinks=3, HQ=6, softcap=50.0, scale=2.0, padding=(0, 4)),
    Step("rotated", T=12, window=5, sinks=3, rope=16),
    Step("partly rotated, rows of their own, padding", T=12, window=5, sinks=3, rope=6, positions=2, padding=(0, 4)),
    Step("rotated, odd sizes, three queries per key", T=9, window=5, sinks=0, D=21, HQ=6, rope=20),
    *(Step(f"D={D}", T=9, window=5, sinks=2, D=D) for D in (1, 40, 100, 256)),
]


def make(case: Step, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> dict[str, Any]:
    """All tokens of the sequences, in the arguments of a step."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    B, T = case.B, case.T
    x: dict[str, Any] = {"q": randn(B, T, case.HQ, case.D)}
    x |= {name: randn(B, T, case.HK, case.D) for name in ("k", "v")}
    x |= {"window": case.window, "sinks": case.sinks, "scale": case.scale, "padding": None}
    x["softcap"] = case.softcap
    angle = 3 * torch.randn(case.positions, T, case.rope // 2, generator=generator).repeat(1, 1, 2).to(device)
    x |= {"cos": angle.cos() if case.rope else None, "sin": angle.sin() if case.rope else None}
    if case.padding is not None:
        x["padding"] = (torch.arange(T)[None] < torch.tensor(case.padding)[:, None]).to(device)
    return x


def empty(case: Step, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A cache without a token."""
    S = case.window + case.sinks
    places = {name: torch.zeros(case.B, case.HK, S, case.D, dtype=dtype, device=DEVICE) for name in ("keys", "values")}
    numbers = torch.zeros(case.B, S, dtype=torch.int32, device=DEVICE)
    return places | {"numbers": numbers, "count": numbers[:, 0].clone()}


def token(x: dict[str, Any], t: int) -> dict[str, Any]:
    """The arguments of step t but for the cache."""
    return {
        name: y[:, t : t + 1] if isinstance(y, torch.Tensor) and name != "state_indices" else y for name, y in x.items()
    }


def run(step_: StepFunction, x: dict[str, Any], cache: dict[str, torch.Tensor]) -> Results:
    return joined(step_(**token(x, t), **cache) for t in range(x["q"].shape[1]))


def joined(steps: Iterable[Results]) -> Results:
    """Of several tokens."""
    o, lse = zip(*steps, strict=True)
    return torch.cat(o, dim=1), torch.cat(lse, dim=1)


def worst_error(found: Results, wanted: Results) -> float:
    return max(relative_error(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("step_", [window_step_, lambda **x: window_step_triton_(WindowStepCall(**x))])
@pytest.mark.parametrize("name", ["window and sinks", "padding on the left"])
def test_caches_may_be_rows_of_larger_tensors(step_: StepFunction, name: str) -> None:
    """The last sequence has the row 0 that is nobody's."""
    case = next(case for case in CASES if case.name == name)
    x, state_indices = make(case), torch.tensor([4, 2, 0][-case.B :], dtype=torch.int32, device=DEVICE)
    own, wide = empty(case), {}
    for name, part in empty(case).items():
        wide[name] = torch.full((5, part[0].numel() + 16), 3, dtype=part.dtype, device=DEVICE)
        wide[name][:, : part[0].numel()] = 0
    larger = {name: y[:, :-16].view(5, *own[name].shape[1:]) for name, y in wide.items()}
    wanted, found = run(step_, x, own), run(step_, x | {"state_indices": state_indices}, larger)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one[:-1], other[:-1])
        assert one.isfinite().all()
    for name, y in larger.items():
        assert torch.equal(y[state_indices[:-1].long()], own[name][:-1])
        assert not y[[1, 3]].any()
        assert (wide[name][:, -16:] == 3).all()


def truth(x: dict[str, Any]) -> Results:
    """The results of all tokens in float64, each row by the definition without its padding."""
    w = {name: y.cpu().double() if isinstance(y, torch.Tensor) and name != "padding" else y for name, y in x.items()}
    o, lse = torch.zeros_like(w["q"]), torch.zeros_like(w["q"][..., 0])
    w |= {name: rotate(w[name], w["cos"], w["sin"]) for name in ("q", "k") if w["cos"] is not None}
    for row, tokens in enumerate(w["q"].unsqueeze(1)):
        first = 0 if x["padding"] is None else int(x["padding"][row].sum())
        if first < tokens.shape[1]:
            parts = (w[name][row : row + 1, first:] for name in ("q", "k", "v"))
            found = naive_window_attention(*parts, x["window"], x["sinks"], x["scale"], softcap=x["softcap"])
            o[row, first:], lse[row, first:] = found[0][0], found[1][0]
    return o, lse


def triton_step_(**x: Any) -> Results:
    return window_step_triton_(WindowStepCall(**x))


SIDES = [pytest.param(window_step_, id="public"), pytest.param(triton_step_, id="triton")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_one_by_one(case: Step) -> None:
    x = make(case)
    results, wanted = truth(x), expected_cache(case, x)
    for step_ in (window_step_, triton_step_):
        cache = empty(case)
        assert worst_error(run(step_, x, cache), results) < 1e-6, step_
        for name in CACHE:
            if name == "keys" and case.rope:
                assert relative_error(cache[name], wanted[name].double()) < 1e-6, step_
            else:
                assert torch.equal(cache[name].cpu(), wanted[name]), (step_, name)


@pytest.mark.parametrize("step_", SIDES)
def test_projections_may_be_slices_of_one_tensor(step_: StepFunction, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Step("joint", T=9, window=4, sinks=2, rope=8)
    x, caches = make(case), (empty(case), empty(case))
    names = ("q", "k", "v")
    sizes = [x[name].flatten(2).shape[-1] for name in names]
    joint = torch.cat([*(x[name].flatten(2) for name in names), torch.full_like(x["q"][..., 0], torch.nan)], dim=-1)
    parts = {
        name: part.view(x[name].shape) for name, part in zip(names, joint.split([*sizes, 4], dim=-1), strict=False)
    }
    wanted = run(step_, x, caches[0])
    if step_ is triton_step_:  # without a copy
        tokens = [token(x | parts, t) for t in range(case.T)]

        def contiguous(y: torch.Tensor) -> torch.Tensor:
            assert all(y.data_ptr() != one[name].data_ptr() for one in tokens for name in names)
            return y.clone()

        monkeypatch.setattr(torch.Tensor, "contiguous", contiguous)
    assert worst_error(run(step_, x | parts, caches[1]), wanted) < 1e-6
    for name, y in caches[1].items():
        assert relative_error(y, caches[0][name].double()) < 1e-6, name


def expected_cache(case: Step, x: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Sinks at the places before their numbers, the last tokens at sinks + number % window."""
    wanted = {name: y.cpu() for name, y in empty(case).items()}
    x = x | {"k": x["k"] if x["cos"] is None else rotate(x["k"], x["cos"], x["sin"])}
    for row in range(case.B):
        first = 0 if case.padding is None else case.padding[row]
        length = case.T - first
        wanted["count"][row] = length
        for number in range(1, length + 1):
            if number <= case.sinks:
                place = number - 1
            elif number > length - case.window:
                place = case.sinks + number % case.window
            else:
                continue
            wanted["numbers"][row, place] = number
            for name, new in (("keys", x["k"]), ("values", x["v"])):
                wanted[name][row, :, place] = new[row, first + number - 1].cpu()
    return wanted


@pytest.mark.parametrize("step_", SIDES)
def test_rows_of_different_lengths_need_no_mask(step_: StepFunction) -> None:
    case = Step("", T=12, window=5, sinks=3, padding=(0, 4), rope=16)
    x, cache = make(case), empty(case)
    outputs = [step_(**token(x, t) | ({} if t < 4 else {"padding": None}), **cache) for t in range(case.T)]
    assert worst_error(joined(outputs), truth(x)) < 1e-6


@pytest.mark.parametrize("step_", SIDES)
def test_nan_in_padding_stays_there(step_: StepFunction) -> None:
    case = Step("padding", T=12, window=4, sinks=2, padding=(0, 5))
    x, cache = make(case), empty(case)
    for name in ("q", "k", "v"):
        x[name][x["padding"]] = torch.nan
    assert worst_error(run(step_, x, cache), truth(x)) < 1e-6
    assert all(y.isfinite().all() for y in cache.values())


@pytest.mark.parametrize("step_", SIDES)
def test_padding_between_tokens_changes_nothing(step_: StepFunction) -> None:
    case = Step("paused", T=12, window=4, sinks=2)
    x, cache = make(case), empty(case)
    run(step_, x, cache)
    before = {name: y.clone() for name, y in cache.items()}
    pause = token(x, 3) | {"padding": torch.tensor([[True], [False]], device=DEVICE)}
    for result in step_(**pause, **cache):
        assert (result[0] == 0).all()
        assert (result[1] != 0).all()
    for name in CACHE:
        assert torch.equal(cache[name][0], before[name][0]), name
        assert not torch.equal(cache[name][1], before[name][1]), name


@pytest.mark.parametrize("step_", SIDES)
def test_tokens_out_of_sight_are_not_seen(step_: StepFunction) -> None:
    """Numbers decide: a place whose token is too far back, or empty, may hold anything finite."""
    case = Step("rolled back", T=1, window=8, sinks=2)
    x, cache = make(case), empty(case)
    cache["count"].fill_(20)
    cache["keys"].fill_(50.0)
    cache["values"].fill_(50.0)
    cache["numbers"][:, 3] = 13  # seen by token 20, not by token 21
    lse = (x["q"] * x["k"].repeat_interleave(2, dim=2)).sum(-1) / 4
    wanted = x["v"].repeat_interleave(2, dim=2).double(), lse.double()
    assert worst_error(step_(**x, **cache), wanted) < 1e-6


@pytest.mark.parametrize("step_", SIDES)
def test_memory_around_stays_as_it_is(step_: StepFunction, poisoned_memory: None) -> None:
    case = Step("between", T=9, window=4, sinks=2)
    x = make(case)
    around = {name: torch.stack([torch.full_like(y, 77), y, torch.full_like(y, 77)]) for name, y in empty(case).items()}
    found = run(step_, x, {name: y[1] for name, y in around.items()})
    assert worst_error(found, truth(x)) < 1e-6
    for y in around.values():
        assert (y[[0, 2]] == 77).all()


@pytest.mark.parametrize("step_", SIDES)
def test_step_compiles_and_still_moves_in_place(step_: StepFunction) -> None:
    case = Step("compiled", T=3, window=4, sinks=1, padding=(0, 2))
    x = make(case)
    caches = empty(case), empty(case)
    compiled = torch.compile(step_, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, run(compiled, x, caches[0]), run(step_, x, caches[1])))
    for name in CACHE:
        assert torch.equal(caches[0][name], caches[1][name]), name
        assert caches[0][name].any()


def test_the_operator_is_registered_consistently() -> None:
    case = Step("registered", T=1, window=4, sinks=1, padding=(0, 1), rope=4)
    x = token(make(case), 0) | empty(case) | {"scale": 0.25}
    torch.library.opcheck(window_step_op_.op, WindowStepCall(**x))


WRONG: list[tuple[str, Callable[[Any], Any], str]] = [
    ("q", lambda x: x.repeat(1, 2, 1, 1), r"q: got shape \[2, 2, 4, 16\], needs \[B, 1, HQ, D\]"),
    ("q", lambda x: x[:, :, :3], "q: got 3 heads, needs a multiple of the 2 heads of k"),
    ("keys", lambda x: x[:, :, 1:], r"keys: got shape .*needs \[B, HK, S, D\] = \[2, 2, 5, 16\]"),
    ("values", lambda x: x.half(), "values: got dtype torch.float16, needs torch.float32"),
    ("values", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "values: got strides"),
    ("numbers", lambda x: x.long(), "numbers: got dtype torch.int64, needs torch.int32"),
    ("count", lambda x: x[:1], r"count: got shape \[1\], needs \[B\]"),
    ("count", lambda x: None, "count: got NoneType, needs a tensor"),
    ("softcap", lambda x: -50.0, "softcap: got -50.0, needs a finite number above 0"),
    ("softcap", lambda x: True, "softcap: got bool, needs a float or None"),
    ("cos", lambda x: x[..., 1:], "cos: got shape"),
    ("sin", lambda x: None, "sin: needs a tensor"),
    ("padding", lambda x: x.int(), "padding: got dtype torch.int32, needs torch.bool"),
    ("window", lambda x: 0, "window: got 0, needs at least 1"),
]


def test_wrong_arguments_are_named() -> None:
    case = Step("wrong", T=1, window=4, sinks=1, padding=(0, 1), rope=4)
    x = token(make(case), 0) | empty(case)
    rows = [(x | {name: change(x[name])}, (ValueError, TypeError), message) for name, change, message in WRONG]
    assert_refused(window_step_, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [16, 64, 100, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("B", [1, 100])
def test_low_precision_steps_under_a_graph(D: int, dtype: torch.dtype, B: int) -> None:
    case = Step("graph", T=40, window=16, sinks=4, B=B, HQ=12, HK=4, D=D)
    x, cache = make(case, dtype), empty(case, dtype)
    place = {name: y.clone() if isinstance(y, torch.Tensor) else y for name, y in token(x, 0).items()}
    window_step_(**place, **cache)  # compiles
    for y in cache.values():
        y.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = window_step_(**place, **cache)
    outputs = []
    for t in range(case.T):
        for name, y in token(x, t).items():
            if isinstance(y, torch.Tensor):
                place[name].copy_(y)
        graph.replay()
        outputs.append((o.clone(), lse.clone()))
    assert worst_error(joined(outputs), truth(x)) < torch.finfo(dtype).eps
    assert cache["count"].tolist() == [case.T] * B


@pytest.mark.gpu
@pytest.mark.parametrize(("HQ", "HK"), [(32, 8), (9, 3), (64, 1)])
@pytest.mark.parametrize("B", [1, 200])
def test_the_same_bits_every_time(B: int, HQ: int, HK: int) -> None:
    """Programs of one row share its counter, and a key head's programs its place: a race would show in one run."""
    case = Step("repeated", T=8, window=100, sinks=4, B=B, HQ=HQ, HK=HK, D=64)
    x = make(case, torch.bfloat16)
    first = empty(case, torch.bfloat16)
    wanted = run(window_step_, x, first)
    assert worst_error(wanted, truth(x)) < torch.finfo(torch.bfloat16).eps
    for _ in range(20):
        again = empty(case, torch.bfloat16)
        assert all(map(torch.equal, run(window_step_, x, again), wanted))
        assert all(torch.equal(again[name], y) for name, y in first.items())
