"""Decoding steps with late writes against steps that write at once, in PyTorch and in Triton; states in 8 bits."""

from typing import Any

import pytest
import torch

from deltanet_kernels import gated_delta_step_
from deltanet_kernels.arguments import StepCall
from deltanet_kernels.gated_delta_rule.cpu_late_writes import LateState, restored, rounded_to_8_bits
from deltanet_kernels.gated_delta_rule.cpu_step import torch_gated_delta_step_
from deltanet_kernels.gated_delta_rule.step import delta_step_
from support.refusals import assert_refused
from tests.kernels.cases import relative_error
from tests.kernels.test_step import NATIVE, SLOTS, TENSORS, Step, in_larger, make, triton_step_
from tests.kernels.triton_mode import DEVICE

CASES = [
    Step("native", **NATIVE),
    Step("padding, three slices", V=130, K=24, padding=True, **NATIVE),
    Step("query heads share a state, odd sizes", HQ=4, K=20, V=90, norm="per_head", rope=16, offset=True),
    Step("undecayed, grouped heads with a convolution", H=1, HQ=1, HV=2, erase="undecayed", **NATIVE),
    Step("no erasing, as given", erase="off", given=True, gate=False, norm="none"),
]
ROOM = 3
FORMS = (gated_delta_step_, triton_step_)
CHANGED = ("state", "conv_tail")
MOVED = ("q", "k", "v", "a", "b", "z", "cos", "sin")


def late(state: torch.Tensor, room: int = ROOM, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """No writes, with NaN where they will be, and the state; in 8 bits if it is int8."""
    B, HV, K, V = state.shape
    wide = torch.promote_types(state.dtype, torch.float32)
    return {
        "state": state.clone(),
        "late_writes": torch.full((B, HV, room, K + V), torch.nan, dtype=dtype, device=state.device),
        "late_decay": torch.full((B, HV, room), torch.nan, dtype=wide, device=state.device),
        "late_count": torch.zeros(B, HV, dtype=torch.int32, device=state.device),
    }


def current(x: dict[str, torch.Tensor]) -> torch.Tensor:
    names = ("state", "late_writes", "late_decay", "late_count", "state_scale")
    return LateState(*(x.get(name) for name in names)).current(torch.float64)  # type: ignore[arg-type]


def tokens(case: Step, count: int, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Arguments that stay, and those of each token."""
    x = make(case, dtype, DEVICE)
    new = (make(case, dtype, DEVICE, seed) for seed in range(1, count + 1))
    return x, [{name: y[name] for name in MOVED} for y in new]


def doubled(x: dict[str, Any]) -> dict[str, Any]:
    """Floating-point tensors in float64."""
    is_wide = {n: isinstance(t, torch.Tensor) and t.is_floating_point() for n, t in x.items()}
    return {n: t.double() if is_wide[n] else t for n, t in x.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_late_writes_are_those_of_every_token(case: Step) -> None:
    """Over three folds; in float64 the PyTorch form is exact."""
    x, calls = tokens(case, 3 * ROOM + 1)
    for step_, convert, bound in (
        (gated_delta_step_, doubled, 1e-12),
        (gated_delta_step_, dict, 2e-6),
        (triton_step_, dict, 2e-6),
    ):
        tail = x["conv_tail"]
        wanted_x, found_x = ({n: None if x[n] is None else x[n].clone() for n in CHANGED} for _ in range(2))
        wanted_x, found_x = doubled(wanted_x), convert(found_x)
        found_x |= late(found_x["state"], dtype=found_x["state"].dtype)
        for token in calls:
            wanted = torch_gated_delta_step_(StepCall(**doubled(x | token) | wanted_x))
            found = step_(**convert(x | token) | found_x)
            if x["padding"] is not None:
                wanted, found = (o.masked_fill(x["padding"][:, :, None, None], 0.0) for o in (wanted, found))
            assert relative_error(found, wanted) < bound, step_
        assert relative_error(current(found_x), wanted_x["state"]) < bound, step_
        if tail is not None:
            assert relative_error(found_x["conv_tail"], wanted_x["conv_tail"]) < bound
        waiting = torch.ones_like(found_x["late_count"])
        if x["padding"] is not None:
            waiting *= ~x["padding"]
        assert torch.equal(found_x["late_count"], waiting)


@pytest.mark.parametrize("size", [16, 136], ids=["one kernel", "composed"])
def test_drafted_tokens_are_taken_back_by_lowering_the_count(size: int) -> None:
    """3 tokens do not fit beside the writes before, which are folded first, so that the 3 can be taken back."""
    x, calls = tokens(Step("drafts", B=1, K=size, V=size), 5)
    drafts = {n: None if calls[0][n] is None else torch.cat([c[n] for c in calls[2:]], 1) for n in MOVED}
    for step_ in FORMS:
        found, wanted = late(x["state"]), x["state"].clone()
        for token in calls[:2]:
            step_(**x | token | found)
            step_(**x | token | {"state": wanted})
        accepted = wanted.clone()
        outputs = step_(**x | drafts | found)
        assert relative_error(outputs, step_(**x | drafts | {"state": wanted}).double()) < 2e-6
        assert found["late_count"].tolist() == [[3, 3]]
        assert relative_error(found["state"], accepted.double()) < 2e-6  # folded
        assert relative_error(current(found), wanted.double()) < 2e-6
        found["late_count"] -= 2
        step_(**x | calls[2] | {"state": accepted})
        assert relative_error(current(found), accepted.double()) < 2e-6


def test_late_writes_may_be_rows_of_larger_tensors() -> None:
    x, calls = tokens(Step("slots", V=80, **NATIVE), ROOM + 2)
    slots = torch.tensor(SLOTS, dtype=torch.int32, device=DEVICE)
    for step_ in FORMS:
        wanted = late(x["state"]) | {"conv_tail": x["conv_tail"].clone()}
        wanted["state"], wanted["state_scale"] = rounded_to_8_bits(x["state"])
        larger = {name: in_larger(y) for name, y in wanted.items()}
        for token in calls:
            o = step_(**x | token | wanted)
            assert torch.equal(step_(**x | token | larger, slots=slots), o)
        for name, rows in larger.items():
            assert torch.equal(rows[list(SLOTS)].nan_to_num(), wanted[name].nan_to_num()), name
            assert (rows[[0, 1, 3]] == 3).all()


def test_both_forms_round_alike() -> None:
    """Over four folds."""
    x, calls = tokens(Step("rounded", K=32, V=96), 4 * 4 + 1)
    rounding = torch.finfo(torch.bfloat16).eps
    for dtype, writes, bound in (
        (torch.float32, torch.bfloat16, rounding),  # Triton's interpreter truncates to bfloat16
        (torch.bfloat16, torch.float32, rounding),
        (torch.int8, torch.float32, 1e-3),  # a sum in another order may round to the next number
    ):
        start = late(x["state"], 4, writes)
        if dtype == torch.int8:
            start["state"], start["state_scale"] = rounded_to_8_bits(x["state"])
        start["state"] = start["state"].to(dtype)
        states = [{n: t.clone() for n, t in start.items()} for _ in FORMS]
        for token in calls:
            outputs = [step_(**x | token | y) for step_, y in zip(FORMS, states, strict=True)]
            assert relative_error(outputs[1], outputs[0].double()) < bound
        assert states[1]["state"].dtype == dtype
        wide = [restored(y["state"], y.get("state_scale"), torch.float64) for y in states]
        assert relative_error(wide[1], wide[0]) < bound
        assert relative_error(wide[1], current(start)) > 0.1  # it was folded


def test_a_state_in_8_bits_has_an_error_like_that_of_bfloat16() -> None:
    """Half-lives of 300 tokens, 2,048 tokens, the error of the second half against float64."""
    case = Step("long", B=1, H=4, HQ=4, HV=4, K=32, V=32, qk_silu=False, gate=False, norm="none", given=True)
    x = make(case)
    generator = torch.Generator().manual_seed(1)
    states: list[dict[str, Any]] = [doubled(x), x | {"state": x["state"].bfloat16()}]
    states.append(x | late(x["state"], 16, torch.bfloat16))
    states[2]["state"], states[2]["state_scale"] = rounded_to_8_bits(x["state"])
    squares = torch.zeros(3, dtype=torch.float64)
    for t in range(2048):
        token = {n: torch.randn(1, 1, 128, generator=generator) for n in "qkv"}
        token |= {"a": torch.full((1, 1, 4), -0.0023), "b": torch.full((1, 1, 4), 0.5)}
        outputs = [gated_delta_step_(**y | (doubled(token) if y is states[0] else token)).double() for y in states]
        if t >= 1024:
            squares += torch.stack([(o - outputs[0]).square().sum() for o in outputs])
    _, of_bfloat16, of_8_bits = squares.sqrt().tolist()
    assert 0 < of_8_bits < 1.5 * of_bfloat16


def test_the_operator_with_late_writes_is_registered_consistently() -> None:
    x = make(Step("registered", B=1, H=1, HQ=1, HV=1), device=DEVICE)
    waiting = late(x["state"])
    extra = (waiting["late_writes"].zero_(), waiting["late_decay"].zero_(), waiting["late_count"])
    form = (True, True, False, True, "decayed", 1, None)
    torch.library.opcheck(delta_step_.op, StepCall(*(x.get(name) for name in TENSORS), 0.25, 1e-6, *form, *extra))


def test_wrong_late_writes_are_named() -> None:
    x = make(Step("wrong"), device=DEVICE)
    x |= late(x["state"])
    rows: list[tuple[dict[str, Any], Any, str]] = [
        ({"late_decay": None}, ValueError, "late_decay: the late writes, their decay and count are given together"),
        ({"late_writes": None}, ValueError, "late_decay: the late writes"),
        (
            {"late_writes": x["late_writes"][..., 1:]},
            ValueError,
            r"late_writes: got shape .* needs \[B, HV, R, K \+ V\]",
        ),
        (
            {"late_writes": x["late_writes"].half()},
            TypeError,
            "late_writes: got dtype torch.float16, needs torch.float32",
        ),
        ({"late_count": x["late_count"].long()}, TypeError, "late_count: got dtype torch.int64, needs torch.int32"),
        ({"late_decay": x["late_decay"].transpose(0, 1)}, ValueError, "late_decay: got strides"),
        ({"state": x["state"].to(torch.int8)}, ValueError, "state_scale: .* with an int8 state"),
        ({"state_scale": x["state"][..., 0]}, ValueError, "state_scale: .* with an int8 state"),
        ({n: x[n].repeat(1, 4, 1) for n in ("q", "k", "v", "a", "b", "z")}, ValueError, "late_writes: got room for 3"),
    ]
    assert_refused(gated_delta_step_, [(x | wrong, errors, message) for wrong, errors, message in rows])


@pytest.mark.gpu
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("B", [2, 300])
def test_late_writes_under_a_graph(K: int, dtype: torch.dtype, B: int) -> None:
    """One recorded step over two folds, like steps in PyTorch, and the same bits every time."""
    case = Step("graph", B=B, H=4, HQ=4, HV=4, K=K, V=K, padding=True, rope=K // 4 * 2, **NATIVE)
    x = make(case, torch.bfloat16, DEVICE)
    start = late(x["state"], 16, torch.bfloat16) | {"conv_tail": x["conv_tail"]}
    if dtype == torch.int8:
        start["state"], start["state_scale"] = rounded_to_8_bits(x["state"])
    start["state"] = start["state"].to(dtype)
    found, wanted, again = ({n: t.clone() for n, t in start.items()} for _ in range(3))
    gated_delta_step_(**x | found)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = gated_delta_step_(**x | found)
    for y, z in start.items():
        found[y].copy_(z)
    for _ in range(40):
        graph.replay()
        expected = torch_gated_delta_step_(StepCall(**x | wanted))
        repeated = gated_delta_step_(**x | again)
        real = ~x["padding"]
        assert relative_error(o[real], expected[real].double()) < 2e-2
        assert torch.equal(o[real], repeated[real])
    assert relative_error(current(found), current(wanted)) < 1e-2
    assert all(torch.equal(found[n].nan_to_num(), again[n].nan_to_num()) for n in found)
