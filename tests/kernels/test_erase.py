"""Identities, hazards and packing of the erase term on a CPU; test_reference_delta_rule.py has its shapes."""

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
from tests.kernels.cases import (
    ERASE_CASES,
    Case,
    as_double,
    assert_close,
    make_inputs,
    relative_error,
    results,
    truth,
)


def test_recurrence_is_the_formula() -> None:
    """The gate on the read is not shared between the forms."""
    q, k, _ = torch.eye(3, dtype=torch.float64).view(3, 1, 1, 1, 3)
    v, state = torch.full((1, 1, 1, 2), 10.0).double(), torch.ones(1, 1, 3, 2).double()
    g, beta = torch.full((2, 1, 1, 1), 0.5).double().log_()
    for erase, read in (("decayed", 0.5), ("undecayed", 1.0), ("off", 0.0)):
        o, final = naive_gated_delta_rule(q, k, v, g, beta.exp(), 1.0, state, True, erase=erase)
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


def test_packed_sequences_do_not_mix() -> None:
    """Every form of ERASE_CASES, packed, is that of each sequence alone."""
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
    inputs = make_inputs(Case("compiled", T=40, H=1, HV=2, K=4, V=6, raw=True, erase="undecayed"))
    wanted = results(chunk_gated_delta_rule, inputs)
    compiled = torch.compile(chunk_gated_delta_rule, backend="aot_eager", fullgraph=True)
    assert_close(results(compiled, inputs), wanted, 1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = results(chunk_gated_delta_rule, inputs)
    assert all(torch.equal(again[name], x) for name, x in wanted.items())


@pytest.mark.parametrize("erase", ["undecayed", "off"])
def test_registered_operators_are_consistent(erase: str) -> None:
    inputs = make_inputs(Case("registered", T=20, HV=2, K=3, V=4, erase=erase), torch.float64)
    tensors = [inputs[name] for name in ("q", "k", "v", "g", "beta", "initial_state")]
    torch.library.opcheck(torch.ops.deltanet_kernels.torch_chunk_forward.default, (*tensors, 0.5, True, True, erase))


def test_gradcheck() -> None:
    case = Case("gradcheck", T=9, H=1, HQ=2, K=2, V=3, erase="undecayed")
    inputs = make_inputs(case, torch.float64)
    names = ["q", "k", "v", "g", "beta", "initial_state"]

    def run(*tensors: torch.Tensor) -> Any:
        return torch_chunk_gated_delta_rule(**(inputs | dict(zip(names, tensors, strict=True))))

    assert torch.autograd.gradcheck(run, [inputs[name] for name in names], fast_mode=True)


@pytest.mark.parametrize("form", [
    chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule, naive_gated_delta_rule,
])  # fmt: skip
def test_another_form_is_refused(form: Any) -> None:
    x = torch.ones(1, 6, 1, 4)
    with pytest.raises(ValueError, match="erase: got 'on', needs one of 'decayed', 'off', 'undecayed'"):
        form(x, x, x, -x[..., 0], x[..., 0], erase="on")
