"""The definition of the erase term, and its forms on a CPU; test_reference_delta_rule.py has shapes and hazards."""

import pytest
import torch

from deltanet_kernels import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    naive_gated_delta_rule,
    torch_chunk_gated_delta_rule,
)
from tests.kernels.cases import Case, assert_close, make_inputs, results, truth


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


def test_another_form_is_refused() -> None:
    x = torch.ones(1, 6, 1, 4)
    operators = chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule
    for operator in (*operators, naive_gated_delta_rule):
        with pytest.raises(ValueError, match="erase: got 'on', needs one of 'decayed', 'off', 'undecayed'"):
            operator(x, x, x, -x[..., 0], x[..., 0], erase="on")
