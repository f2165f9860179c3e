"""The recurrent kernel against the recurrence in float64, and its state in place."""

import pytest
import torch

from deltanet_kernels.gated_delta_rule.recurrent import gated_delta_rule_step_
from tests.kernels.cases import Case, make_inputs, relative_error, truth
from tests.kernels.triton_mode import DEVICE, triton_recurrent

CASES = [
    Case("decode", T=1, B=3, H=2, HV=4, HQ=2, raw=True),
    Case("query heads share a state", T=4, H=1, HQ=4, HV=2, K=24, V=20),
    Case("packed", T=9, H=1, cu_seqlens=(0, 0, 1, 5, 8)),
    Case("closed gates, no norm", T=5, H=1, g="reset", l2norm=False, scale=0.7),
    Case("no state", T=3, H=1, initial_state=False),
    Case("off", T=3, H=1, HQ=2, HV=2, erase="off", raw=True),
    Case("undecayed", T=3, H=1, HQ=1, HV=2, K=24, V=20, erase="undecayed", g="reset"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_recurrent(case: Case) -> None:
    inputs = make_inputs(case, torch.float32, DEVICE)
    wanted = truth(inputs)
    with torch.no_grad():
        o, state = triton_recurrent(**inputs)
    assert relative_error(o, wanted["o"]) < 1e-6
    assert relative_error(state, wanted["final_state"]) < 1e-6


def test_gradients_come_from_the_chunk_kernels() -> None:
    inputs = make_inputs(Case("gradient", T=3, H=1), torch.float32, DEVICE)
    o, _ = triton_recurrent(**inputs)
    o.sum().backward()
    assert inputs["k"].grad.abs().sum() > 0


def test_step_moves_the_state_in_place() -> None:
    case = Case("steps", T=4, B=2, H=1, HV=2, HQ=2, raw=True)
    inputs = make_inputs(case, torch.float32, DEVICE)
    wanted = truth(inputs)
    state = inputs["initial_state"].detach().clone()
    where = state.data_ptr()
    gates = {"A_log": inputs["A_log"].detach(), "dt_bias": inputs["dt_bias"].detach()}
    steps = []
    for t in range(case.T):
        token = [inputs[name].detach()[:, t : t + 1] for name in ("q", "k", "v", "g", "beta")]
        steps.append(
            gated_delta_rule_step_(
                *token, state, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, **gates
            )
        )
    assert state.data_ptr() == where
    assert relative_error(torch.cat(steps, 1), wanted["o"]) < 1e-6
    assert relative_error(state, wanted["final_state"]) < 1e-6
    with pytest.raises(ValueError, match="needs a contiguous"):
        gated_delta_rule_step_(*token, state.transpose(2, 3))


def test_step_compiles_and_still_moves_the_state() -> None:
    inputs = make_inputs(Case("compile", T=2, H=1), torch.float32, DEVICE)
    token = [inputs[name].detach() for name in ("q", "k", "v", "g", "beta")]
    states = [inputs["initial_state"].detach().clone() for _ in range(2)]
    compiled = torch.compile(gated_delta_rule_step_, fullgraph=True, backend="aot_eager")
    assert torch.equal(gated_delta_rule_step_(*token, states[0]), compiled(*token, states[1]))
    assert torch.equal(*states)
    assert not torch.equal(states[0], inputs["initial_state"].detach())


@pytest.mark.gpu
@pytest.mark.parametrize("K", [16, 64, 100, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_steps_under_a_graph(K: int, dtype: torch.dtype) -> None:
    case = Case("graph", T=2, B=4, H=2, HV=4, HQ=2, K=K, raw=True)
    inputs = make_inputs(case, dtype, DEVICE)
    wanted = truth(inputs)
    state = inputs["initial_state"].detach().clone()
    token = [inputs[name].detach() for name in ("q", "k", "v", "g", "beta")]
    options = {"A_log": inputs["A_log"].detach(), "dt_bias": inputs["dt_bias"].detach()}
    options |= {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    gated_delta_rule_step_(*token, state.clone(), **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = gated_delta_rule_step_(*token, state, **options)
    graph.replay()
    assert relative_error(o, wanted["o"]) < torch.finfo(dtype).eps
    assert relative_error(state, wanted["final_state"]) < 1e-6
