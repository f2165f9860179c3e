"""The CPU path under autocast, torch.compile and checkpointing; memory kept; choice of the implementation."""

import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from deltanet_kernels import chunk_gated_delta_rule, dispatch, fused_recurrent_gated_delta_rule
from deltanet_kernels.gated_delta_rule.cpu_forward import (
    FLOOR,
    Block,
    CpuForward,
    Sizes,
    Workspace,
    prepare,
    torch_chunk_forward,
)
from tests.kernels.cases import Case, assert_close, make_inputs, results

every_erase = pytest.mark.parametrize("erase", ["decayed", "undecayed", "off"])


@every_erase
def test_autocast_does_not_lower_the_precision(erase: str) -> None:
    inputs = make_inputs(Case("autocast", T=70, B=2, H=2, erase=erase))
    plain = results(chunk_gated_delta_rule, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results(chunk_gated_delta_rule, inputs)
        with torch.no_grad():
            step = {name: x[:, :1] for name, x in inputs.items() if name in ("q", "k", "v", "g", "beta")}
            o, state = fused_recurrent_gated_delta_rule(**(inputs | step))
    for name, x in plain.items():
        assert torch.equal(found[name], x), name
    with torch.no_grad():
        again, again_state = fused_recurrent_gated_delta_rule(**(inputs | step))
    assert torch.equal(o, again)
    assert torch.equal(state, again_state)


@every_erase
def test_compiles_without_graph_break(erase: str) -> None:
    inputs = make_inputs(Case("compiled", T=70, H=2, raw=True, erase=erase))
    compiled = torch.compile(chunk_gated_delta_rule, backend="aot_eager", fullgraph=True)
    assert_close(results(compiled, inputs), results(chunk_gated_delta_rule, inputs), 1e-6)


@every_erase
def test_registered_operators_are_consistent(erase: str) -> None:
    """Shapes of the fake implementation, and the gradient's registration, against the real thing."""
    inputs = make_inputs(Case("registered", T=66, H=1, HQ=2, HV=2, K=3, V=4), torch.float64)
    tensors = [inputs[name] for name in ("q", "k", "v", "g", "beta", "initial_state")]
    torch.library.opcheck(torch_chunk_forward.op, CpuForward(*tensors, 0.5, True, erase, True))


@every_erase
def test_where_only_gates_learn_their_gradients_are_the_same(erase: str) -> None:
    inputs = make_inputs(Case("gates", T=150, B=2, H=2, HQ=4, HV=2)) | {"erase": erase}
    gates = [inputs["g"], inputs["beta"]]

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(chunk_gated_delta_rule(**inputs)[0].square().sum(), gates)

    wanted = gradients()
    for name in ("q", "k", "v"):
        inputs[name] = inputs[name].detach()
    for found, value in zip(gradients(), wanted, strict=True):
        assert torch.equal(found, value)


def test_second_derivatives_are_refused() -> None:
    inputs = make_inputs(Case("twice", T=5))
    o, _ = chunk_gated_delta_rule(**inputs)
    (gradient,) = torch.autograd.grad(o.square().sum(), inputs["q"], create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


def test_backward_keeps_the_inputs_the_states_and_the_values_only() -> None:
    case = Case("kept", T=256, B=1, H=2, K=32)
    inputs = make_inputs(case)
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        chunk_gated_delta_rule(**inputs)
    inputs_bytes = sum(inputs[name].nbytes for name in ("q", "k", "v", "g", "beta"))
    values_bytes = inputs["v"].nbytes
    states_bytes = 4 * inputs["initial_state"].nbytes  # four chunks of 64 tokens
    assert sum(kept.values()) == inputs_bytes + values_bytes + states_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decays_too_small_to_matter_are_exactly_zero(dtype: torch.dtype) -> None:
    """Denormal numbers would slow matrix products down by an order of magnitude."""
    step = -FLOOR[dtype] / 8.5
    q = torch.ones(1, 64, 1, 2, dtype=dtype)
    g = torch.full((1, 64, 1), -step, dtype=dtype)
    call = CpuForward(q, q, q, g, torch.ones_like(g), None, 1.0, True, "decayed")
    prepared = prepare(Sizes.of(call), Block(0, 1, 64), Workspace(dtype, q.device), call)
    distance = torch.arange(64).unsqueeze(1) - torch.arange(64)
    expected = torch.where((distance >= 0) & (distance <= 8), torch.exp(-step * distance.to(dtype)), 0.0)
    torch.testing.assert_close(prepared.decay[0, 0], expected, rtol=1e-5, atol=0)


def test_cpu_needs_no_triton_module() -> None:
    code = (
        "import sys, torch, deltanet_kernels as d\n"
        "x = torch.ones(1, 2, 1, 4)\n"
        "d.chunk_gated_delta_rule(x, x, x, -x[..., 0], x[..., 0])\n"
        "d.gated_rms_norm(x, None, x[0, 0, 0], 1e-6)\n"
        "unused = {'deltanet_kernels.gated_delta_rule.chunk', 'deltanet_kernels.norm', 'transformers'}\n"
        "assert not unused & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


class OnCuda(NamedTuple):
    x: Any = SimpleNamespace(is_cuda=True)


def two(call: OnCuda) -> int:
    return 2


def falls_back_with_one_warning(words: str) -> None:
    operator = dispatch.Operator("doubled", OnCuda, lambda _: None, two)
    with pytest.warns(RuntimeWarning, match=words):
        assert operator() == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert operator() == 2


def test_fallback_warns_once_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from deltanet_kernels import triton_forms

    def refuse(call: OnCuda) -> int:
        raise NotImplementedError("head size 1024 is too large")

    monkeypatch.setitem(triton_forms.FORMS, "doubled", refuse)
    falls_back_with_one_warning("doubled: .* much slower .*head size 1024 is too large")


def test_missing_triton_side_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltanet_kernels.triton_forms", None)
    falls_back_with_one_warning("doubled: .*cannot be imported: .*deltanet_kernels.triton_forms")
