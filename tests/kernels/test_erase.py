"""The forms of the erase term on the CPU: chunked and recurrent against the recurrence in float64, and identities."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from deltanet_kernels import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    naive_gated_delta_rule,
    torch_chunk_gated_delta_rule,
)
from deltanet_kernels.gated_delta_rule.reference import l2_normalize
from tests.kernels.cases import (
    ERASE_CASES,
    Case,
    as_double,
    assert_close,
    make_inputs,
    relative_error,
    results,
    truth,
    truth_of,
)


@pytest.mark.parametrize("case", ERASE_CASES, ids=str)
def test_chunked_form_in_float64(case: Case) -> None:
    inputs = as_double(make_inputs(case))
    assert_close(results(torch_chunk_gated_delta_rule, inputs), truth_of(case), 1e-13 * case.condition)


@pytest.mark.parametrize("case", [c for c in ERASE_CASES if c.T != 130 or c.g != "random"], ids=str)
def test_chunked_form_in_float32(case: Case) -> None:
    found = results(chunk_gated_delta_rule, make_inputs(case))
    assert all(x.dtype == torch.float32 for x in found.values())
    assert_close(found, truth_of(case), 2e-6 * case.condition)


@pytest.mark.parametrize("T", [1, 7])
@pytest.mark.parametrize("name", ["off", "undecayed", "own key", "own key, undecayed", "mini-batches of 3"])
def test_recurrent_form(name: str, T: int) -> None:
    form = {"off": {"erase": "off"}, "undecayed": {"erase": "undecayed"}, "own key": {"own_key": True},
            "own key, undecayed": {"own_key": True, "erase": "undecayed"},
            "mini-batches of 3": {"erase": "chunk_start", "minibatch": 3, "own_key": True}}[name]  # fmt: skip
    inputs = make_inputs(Case(name, T=T, B=2, H=1, HQ=4, HV=2, K=16, V=24, raw=True, **form))
    wanted = truth(inputs)
    with torch.no_grad():
        o, state = fused_recurrent_gated_delta_rule(**inputs)
    assert relative_error(o, wanted["o"]) < 2e-6
    assert relative_error(state, wanted["final_state"]) < 2e-6


def test_recurrence_is_the_formula() -> None:
    """p reads, k writes; neither the read nor the gate on it is shared with the rule's other forms."""
    q, k, p = torch.eye(3, dtype=torch.float64).view(3, 1, 1, 1, 3)
    v, state = torch.full((1, 1, 1, 2), 10.0).double(), torch.ones(1, 1, 3, 2).double()
    g, beta = torch.full((2, 1, 1, 1), 0.5).double().log_()
    for erase, read in (("decayed", 0.5), ("undecayed", 1.0), ("off", 0.0), ("chunk_start", 0.5)):
        extra = {"erase_key": None if erase == "off" else p, "minibatch": 4 if erase == "chunk_start" else None}
        o, final = naive_gated_delta_rule(
            q, k, v, g, beta.exp(), 1.0, state, True, erase=erase, **extra
        )  # fmt: skip
        wanted = torch.full((3, 2), 0.5).double()
        wanted[1] += 0.5 * (10 - read)
        torch.testing.assert_close(final[0, 0], wanted)
        torch.testing.assert_close(o[0, 0, 0], wanted[0])


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 1e-12) -> None:
    assert_close({name: found[name] for name in wanted}, wanted, tolerance)


def double(name: str, **options: Any) -> dict[str, Any]:
    return make_inputs(Case(name, T=130, H=2, HV=4, K=8, V=12, **options), torch.float64)


def test_no_erasing_is_a_vanishing_strength_with_values_as_much_larger() -> None:
    inputs = double("off")
    found = results(chunk_gated_delta_rule, inputs | {"erase": "off"})
    tiny = torch.full_like(inputs["beta"], 2.0**-60)
    values = inputs["v"] * (inputs["beta"] / tiny).unsqueeze(-1)
    o, state = chunk_gated_delta_rule(**inputs | {"beta": tiny, "v": values})
    same(found, {"o": o.detach(), "final_state": state.detach()})


def test_two_reflections_erase_nothing() -> None:
    """Strength 2 twice with one unit key: the second write undoes the first one's reflection."""
    inputs = double("reflections", l2norm=False) | {"erase": "off"}
    wanted, final = chunk_gated_delta_rule(**inputs | {"beta": torch.ones_like(inputs["beta"])})
    zero = torch.zeros_like
    twice = {name: inputs[name].repeat_interleave(2, dim=1) for name in ("q", "k")}
    twice["v"] = torch.stack([zero(inputs["v"]), inputs["v"] / 2], dim=2).flatten(1, 2)
    twice["g"] = torch.stack([inputs["g"], zero(inputs["g"])], dim=2).flatten(1, 2)
    twice["beta"] = torch.full_like(twice["g"], 2.0)
    o, state = chunk_gated_delta_rule(**inputs | twice | {"erase": "decayed"})
    assert relative_error(o[:, 1::2], wanted.detach()) < 1e-12
    assert relative_error(state, final.detach()) < 1e-12


def test_an_erase_key_along_the_key_is_another_strength() -> None:
    """p = b k as in Comba: the strength b beta with values v / b, which the fused step takes."""
    inputs = double("feedback") | {"erase": "undecayed"}
    wanted, _ = chunk_gated_delta_rule(**inputs, erase_key=0.7 * l2_normalize(inputs["k"]))
    o, _ = chunk_gated_delta_rule(**inputs | {"beta": 0.7 * inputs["beta"], "v": inputs["v"] / 0.7})
    assert relative_error(o, wanted.detach()) < 1e-12


def test_undecayed_is_decayed_with_strength_over_the_gate() -> None:
    """Comba's rule by the decayed one: beta / e^g, v e^g."""
    inputs = double("undecayed")
    found = results(chunk_gated_delta_rule, inputs | {"erase": "undecayed"})
    gate = inputs["g"].exp()
    o, state = chunk_gated_delta_rule(**inputs | {"beta": inputs["beta"] / gate, "v": inputs["v"] * gate[..., None]})
    same(found, {"o": o.detach(), "final_state": state.detach()})


def test_undecayed_without_gates_is_the_delta_rule() -> None:
    inputs = double("no gates", g="zero")
    wanted = results(chunk_gated_delta_rule, inputs)
    found = results(chunk_gated_delta_rule, inputs | {"erase": "undecayed"})
    same(found, {name: x for name, x in wanted.items() if name != "dg"})


@pytest.mark.parametrize("erase", ["decayed", "undecayed"])
def test_the_key_as_its_own_erase_key(erase: str) -> None:
    """The gradients of both roles add up to that of the key; the erase key is not normalised, the key is."""
    inputs = double("same key") | {"erase": erase}
    key = inputs["k"]
    wanted = results(chunk_gated_delta_rule, inputs)

    def function(**x: Any) -> Any:
        return chunk_gated_delta_rule(**x, erase_key=l2_normalize(x["k"]))

    same(results(function, inputs), wanted)
    longer = chunk_gated_delta_rule(**inputs, erase_key=2 * l2_normalize(key))[0]
    assert relative_error(longer, wanted["o"]) > 0.1


def test_an_erase_key_of_zero_erases_nothing() -> None:
    inputs = double("zero")
    wanted = results(chunk_gated_delta_rule, inputs | {"erase": "off"})
    same(results(chunk_gated_delta_rule, inputs | {"erase_key": torch.zeros_like(inputs["k"])}), wanted)


@pytest.mark.parametrize("form", [chunk_gated_delta_rule, torch_chunk_gated_delta_rule, naive_gated_delta_rule])
def test_mini_batches_of_one_token_are_the_delta_rule(form: Any) -> None:
    inputs = double("one")
    same(results(form, inputs | {"erase": "chunk_start", "minibatch": 1}), results(form, inputs))


def test_mini_batches_continue_from_call_to_call() -> None:
    inputs = double("mini", l2norm=True) | {"erase": "chunk_start", "minibatch": 16}
    whole, final = chunk_gated_delta_rule(**inputs)
    pieces, state = [], inputs["initial_state"]
    for start, end in ((0, 16), (16, 112), (112, 130)):
        part = {name: inputs[name][:, start:end] for name in ("q", "k", "v", "g", "beta")}
        o, state = chunk_gated_delta_rule(**inputs | part | {"initial_state": state})
        pieces.append(o)
    assert relative_error(torch.cat(pieces, 1), whole.detach()) < 1e-12
    assert relative_error(state, final.detach()) < 1e-12


def test_packed_sequences_do_not_mix() -> None:
    """Every form of ERASE_CASES, packed, is that of each sequence alone: mini-batches start with each sequence."""
    for case in (c for c in ERASE_CASES if c.cu_seqlens is not None):
        inputs = as_double(make_inputs(case))
        o, state = chunk_gated_delta_rule(**inputs)
        offsets = inputs.pop("cu_seqlens").tolist()
        for n, (a, b) in enumerate(pairwise(offsets)):
            if a == b:
                continue
            cut = {name: x[:, a:b] for name, x in inputs.items() if isinstance(x, torch.Tensor) and x.dim() in (3, 4)}
            cut["initial_state"] = inputs["initial_state"][n : n + 1]
            alone, last = chunk_gated_delta_rule(**inputs | cut)
            assert relative_error(o[:, a:b], alone.detach()) < 1e-12
            assert relative_error(state[n : n + 1], last.detach()) < 1e-12


@pytest.mark.parametrize("g", [-30.0, -80.0, -150.0, -torch.inf])
def test_undecayed_prediction_under_any_gate(g: float) -> None:
    """No division by the gate: right where the mapped form overflows."""
    inputs = make_inputs(Case("hazard", T=70, H=1, K=8))
    inputs["g"] = torch.full_like(inputs["g"], g).requires_grad_()
    inputs |= {"erase": "undecayed"}
    found = results(chunk_gated_delta_rule, inputs)
    assert all(x.isfinite().all() for x in found.values())
    wanted = truth(inputs)
    if g == -torch.inf:  # autograd of the loop multiplies 0 by infinity nowhere, but its dg is that of e^g = 0
        assert (found["dg"] == 0).all()
    assert_close(found, wanted, 2e-6)


def test_no_erasing_in_float16_with_strengths_up_to_2() -> None:
    inputs = make_inputs(Case("half", T=130, H=2, erase="off", beta="two"), torch.float16)
    found = results(chunk_gated_delta_rule, inputs)
    assert all(x.isfinite().all() for x in found.values())
    assert_close(found, truth(inputs), 2 * torch.finfo(torch.float16).eps)


def test_compiled_and_under_autocast() -> None:
    inputs = make_inputs(Case("compiled", T=40, H=1, HV=2, K=4, V=6, own_key=True, raw=True, erase="undecayed"))
    wanted = results(chunk_gated_delta_rule, inputs)
    compiled = torch.compile(chunk_gated_delta_rule, backend="aot_eager", fullgraph=True)
    assert_close(results(compiled, inputs), wanted, 1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = results(chunk_gated_delta_rule, inputs)
    assert all(torch.equal(again[name], x) for name, x in wanted.items())


@pytest.mark.parametrize("case", [
    Case("own key", T=20, HV=2, K=3, V=4, own_key=True, erase="undecayed"),
    Case("mini-batches", T=20, HV=2, K=3, V=4, erase="chunk_start", minibatch=8),
], ids=str)  # fmt: skip
def test_registered_operators_are_consistent(case: Case) -> None:
    inputs = make_inputs(case, torch.float64)
    tensors = [inputs[name] for name in ("q", "k", "v", "g", "beta", "initial_state")]
    form = (inputs.get("erase_key"), case.erase, case.minibatch or 64)
    torch.library.opcheck(torch.ops.deltanet_kernels.torch_chunk_forward.default, (*tensors, 0.5, True, True, *form))


def test_gradcheck() -> None:
    case = Case("gradcheck", T=9, H=1, HQ=2, K=2, V=3, own_key=True, erase="undecayed")
    inputs = make_inputs(case, torch.float64)
    names = ["q", "k", "v", "g", "beta", "initial_state", "erase_key"]

    def run(*tensors: torch.Tensor) -> Any:
        return torch_chunk_gated_delta_rule(**(inputs | dict(zip(names, tensors, strict=True))))

    assert torch.autograd.gradcheck(run, [inputs[name] for name in names], fast_mode=True)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"erase": "on"}, ValueError, "erase: got 'on', needs one of 'decayed', 'off', 'undecayed', 'chunk_start'"),
    ({"erase": "chunk_start"}, ValueError, "minibatch: got None, needs a number of tokens >= 1"),
    ({"erase": "chunk_start", "minibatch": 0}, ValueError, "minibatch: got 0, needs a number"),
    ({"minibatch": 16}, ValueError, "minibatch: got 16, needs None unless erase='chunk_start'"),
    ({"erase_key": torch.ones(1, 5, 1, 4)}, ValueError, r"erase_key: got shape \[1, 5, 1, 4\], needs"),
    ({"erase_key": torch.ones(1, 6, 1, 4).half()}, TypeError, "erase_key: got dtype torch.float16"),
    ({"erase_key": torch.empty(1, 6, 1, 4, device="meta")}, ValueError, "erase_key: got device meta"),
    ({"erase_key": 1.0}, TypeError, "erase_key: got float, needs a tensor"),
    ({"erase": "off", "erase_key": torch.ones(1, 6, 1, 4)}, ValueError, "erase_key: got a tensor, needs None with"),
]  # fmt: skip


@pytest.mark.parametrize("form", [
    chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule, naive_gated_delta_rule,
])  # fmt: skip
@pytest.mark.parametrize(("change", "error", "message"), WRONG)
def test_wrong_arguments_are_named(form: Any, change: dict[str, Any], error: type[Exception], message: str) -> None:
    x = torch.ones(1, 6, 1, 4)
    with pytest.raises(error, match=message):
        form(x, x, x, -x[..., 0], x[..., 0], **change)
