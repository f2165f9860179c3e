"""The operators take flash-linear-attention 0.6's arguments: dtypes, layouts, gates, arguments without an effect.

Every form of a call is compared, with all gradients, with autograd of the recurrence in float64; in PyTorch, and by the
Triton kernels in the interpreter or on a GPU.
"""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deltanet_kernels import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from deltanet_kernels.dispatch import Operator
from deltanet_kernels.gated_delta_rule import drop_in
from support.refusals import assert_refused
from tests.kernels.cases import Case, as_double, assert_close, make_inputs, relative_error, results, truth
from tests.kernels.triton_mode import DEVICE, GPU

FORMS = [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule]
SMALL = Case("small", T=9, H=1, HV=2, K=8, V=5)
RAW = Case("raw", T=9, H=1, HV=2, K=8, V=5, raw=True)
PACKED = Case("packed", T=13, H=1, HQ=4, HV=2, K=6, V=5, cu_seqlens=(0, 0, 1, 11), raw=True)
MIXED = {"q": torch.bfloat16, "v": torch.float16}
HALF_STATE = {"initial_state": torch.float16}

# A call, dtypes of some inputs, and other arguments.
CALLS: dict[str, tuple[Case, dict[str, torch.dtype], dict[str, Any]]] = {
    "no bias, gate in bfloat16": (RAW, {"A_log": torch.bfloat16, "g": torch.bfloat16}, {"dt_bias": None}),
    "state in float16": (SMALL, HALF_STATE, {}),
    "state in float64": (SMALL, {"initial_state": torch.float64}, {}),
    "mixed": (SMALL, MIXED, {}),
    "twice the strength": (RAW, {}, {"allow_neg_eigval": True}),
    "values first": (SMALL, {}, {"state_v_first": True}),
    "values first, no state": (Case("no state", T=5, K=8, V=5, initial_state=False), {}, {"state_v_first": True}),
    "all, packed": (PACKED, MIXED | HALF_STATE, {"dt_bias": None, "allow_neg_eigval": True, "state_v_first": True}),
    "all, undecayed": (
        Case("undecayed", T=9, HV=2, K=8, V=5, raw=True, erase="undecayed"),
        {"k": torch.float16} | HALF_STATE,
        {"dt_bias": None, "allow_neg_eigval": True, "state_v_first": True},
    ),
}  # fmt: skip


# The interpreter takes about a second per chunk and head: in it the forms that the others are made of.
INTERPRETED = ["no bias, gate in bfloat16", "all, packed"]
IN_PYTORCH = [(name, "pytorch") for name in CALLS]
EVERYWHERE = IN_PYTORCH + [(name, "triton") for name in CALLS if GPU or name in INTERPRETED]


@pytest.fixture(params=["pytorch", "triton"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the public operators run; without a GPU, CPU tensors go to the Triton kernels, and to nothing else."""
    if request.param == "pytorch":
        return "cpu"
    if not GPU:

        def unchecked(operator: Operator[..., Any, Any], call: Any) -> Any:
            return operator.triton()(call)

        monkeypatch.setattr(Operator, "unchecked", unchecked)
    return DEVICE


def inputs_of(name: str, device: str = "cpu") -> dict[str, Any]:
    case, dtypes, others = CALLS[name]
    inputs = make_inputs(case) | others
    if others.get("state_v_first") and "initial_state" in inputs:
        inputs["initial_state"] = inputs["initial_state"].mT.contiguous()
    for key, x in inputs.items():
        if isinstance(x, torch.Tensor):
            x = x.detach().to(device, dtypes.get(key))
            inputs[key] = x.requires_grad_(x.is_floating_point())
    return inputs


def tolerance_of(x: torch.Tensor) -> float:
    """Two roundings to 8 digits in 16 bits, else the rounding of float32."""
    return 1e-2 if x.element_size() == 2 else 5e-6


@pytest.mark.parametrize(("name", "device"), EVERYWHERE, indirect=["device"])
def test_results_and_gradients(name: str, device: str) -> None:
    inputs = inputs_of(name, device)
    found = results(chunk_gated_delta_rule, inputs)
    wanted = truth(inputs)
    for key, x in found.items():  # gradients are those of a rounded upstream gradient if the output is rounded
        rounded = found["o"] if key.startswith("d") and found["o"].element_size() == 2 else x
        assert_close({key: x}, {key: wanted[key]}, tolerance_of(rounded))
    assert found["o"].dtype == inputs["q"].dtype
    assert found["final_state"].dtype == torch.float32
    assert found["final_state"].is_contiguous()
    for key, x in inputs.items():
        if isinstance(x, torch.Tensor) and x.requires_grad:
            assert found[f"d{key}"].dtype == x.dtype
            assert found[f"d{key}"].shape == x.shape


def test_gradients_in_float64() -> None:
    for name in CALLS:
        inputs = as_double(inputs_of(name))
        assert_close(results(chunk_gated_delta_rule, inputs), truth(inputs), 1e-12)


@pytest.mark.parametrize(("name", "device"), EVERYWHERE, indirect=["device"])
def test_recurrence_without_gradients(name: str, device: str) -> None:
    inputs = inputs_of(name, device)
    wanted = truth(inputs)
    with torch.no_grad():
        o, state = fused_recurrent_gated_delta_rule(**inputs)
    assert state is not None
    assert o.dtype == inputs["v"].dtype
    assert relative_error(o, wanted["o"]) < tolerance_of(o)
    assert relative_error(state, wanted["final_state"]) < 3e-6


@pytest.mark.parametrize("device", ["pytorch", *["triton"] * GPU], indirect=True)
def test_mixed_dtypes_are_computed_in_the_widest(device: str) -> None:
    inputs = inputs_of("mixed", device)
    wide = {key: x.float() if isinstance(x, torch.Tensor) else x for key, x in inputs.items()}
    for form, dtype in zip(FORMS, (torch.bfloat16, torch.float16), strict=True):
        (o, state), (wide_o, wide_state) = form(**inputs), form(**wide)
        assert torch.equal(o, wide_o.to(dtype))
        assert torch.equal(state, wide_state)


GATES: dict[str, tuple[str, ...]] = {
    "gk": ("gk",),
    "gv": ("gv",),
    "gv, strength": ("gv", "strength"),
    "all": ("gk", "gv", "strength"),
}
GATES_EVERYWHERE = [(name, "pytorch") for name in GATES]
GATES_EVERYWHERE += [(name, "triton") for name in GATES if GPU or name in ("gk", "gv, strength")]


def fine_inputs(gates: tuple[str, ...], device: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    case = Case("fine", T=5, H=1, HQ=2, HV=2, K=6, V=2)
    inputs = {name: x for name, x in make_inputs(case).items() if isinstance(x, torch.Tensor)}
    uniform = torch.rand(3, 1, 5, 2, 6, generator=torch.Generator().manual_seed(2))
    fine = {"gk": -uniform[0], "gv": -uniform[1, ..., :2], "strength": uniform[2, ..., :2]}
    inputs |= {"beta" if name == "strength" else name: fine[name] for name in gates}
    return {name: x.detach().to(device, dtype).requires_grad_() for name, x in inputs.items()}


def by_channel(**inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence with any of these gates, token by token."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (inputs["q"], inputs["k"]))
    k = k.repeat_interleave(inputs["v"].shape[2] // k.shape[2], dim=2)
    v, S, beta, g = inputs["v"], inputs["initial_state"], inputs["beta"], inputs["g"][..., None, None]
    beta = beta if beta.dim() == 4 else beta.unsqueeze(-1)
    g = g + inputs["gk"].unsqueeze(-1) if "gk" in inputs else g
    g = g + inputs["gv"].unsqueeze(-2) if "gv" in inputs else g
    outputs = []
    for t in range(v.shape[1]):
        S = S * g[:, t].exp()
        delta = beta[:, t] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + k[:, t].unsqueeze(-1) * delta.unsqueeze(-2)
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), S


def run_fine(**inputs: Any) -> Any:
    return fused_recurrent_gated_delta_rule(**inputs, output_final_state=True, use_qk_l2norm_in_kernel=True)


@pytest.mark.parametrize(("name", "device"), GATES_EVERYWHERE, indirect=["device"])
def test_gates_per_channel(name: str, device: str) -> None:
    inputs = fine_inputs(GATES[name], device)
    wanted = results(by_channel, as_double(inputs))
    assert_close(results(run_fine, inputs), wanted, 5e-6)
    with torch.no_grad():
        o, state = run_fine(**inputs)
    assert relative_error(o, wanted["o"]) < 1e-6
    assert relative_error(state, wanted["final_state"]) < 1e-6
    assert state.is_contiguous()


def test_gates_per_channel_in_float64() -> None:
    for gates in GATES.values():
        inputs = fine_inputs(gates, "cpu", torch.float64)
        assert_close(results(run_fine, inputs), results(by_channel, inputs), 1e-12)


@pytest.mark.parametrize("device", ["pytorch", *["triton"] * GPU], indirect=True)
def test_gates_per_channel_with_everything_else(device: str) -> None:
    """Logits, packed sequences, the state in another layout and dtype: the gates add to those that logits make."""
    inputs = inputs_of("all, packed", device) | {"cu_seqlens": None, "initial_state": None}
    inputs |= {name: inputs[name][:, :4].detach() for name in ("q", "k", "v", "g", "beta")}
    inputs["q"] = inputs["q"][:, :, :2]
    gv = torch.rand(inputs["v"].shape, generator=torch.Generator().manual_seed(3)).to(device)
    offsets = torch.tensor([0, 1, 4], device=device)
    first = torch.ones(2, 2, 5, 6, dtype=torch.float16, device=device)
    packed = inputs | {"cu_seqlens": offsets, "initial_state": first}
    with torch.no_grad():
        o, state = fused_recurrent_gated_delta_rule(**packed, gv=-gv)
        for n, (start, end) in enumerate(((0, 1), (1, 4))):
            cut = {name: inputs[name][:, start:end] for name in ("q", "k", "v", "g", "beta")}
            alone, last = fused_recurrent_gated_delta_rule(
                **inputs | cut | {"initial_state": first[n : n + 1]}, gv=-gv[:, start:end]
            )
            g = -inputs["A_log"].exp() * torch.nn.functional.softplus(cut["g"])
            plain = {"use_gate_in_kernel": False, "A_log": None, "g": None}
            wanted, _ = fused_recurrent_gated_delta_rule(
                **inputs | cut | {"initial_state": first[n : n + 1]} | plain, gv=g.unsqueeze(-1) - gv[:, start:end]
            )
            torch.testing.assert_close(alone, o[:, start:end], rtol=2e-3, atol=1e-5)
            torch.testing.assert_close(wanted, alone, rtol=2e-3, atol=1e-5)
            torch.testing.assert_close(last, state[n : n + 1], rtol=1e-5, atol=1e-6)
    assert o.dtype == torch.float16


def test_absent_gates_decay_nothing_and_write_all(device: str) -> None:
    inputs = {name: x.detach() for name, x in fine_inputs((), device).items()}
    g, beta = inputs.pop("g"), inputs.pop("beta")
    found = run_fine(**inputs)
    wanted = run_fine(**inputs, g=torch.zeros_like(g), beta=torch.ones_like(beta))
    logits = run_fine(**inputs, use_beta_sigmoid_in_kernel=True)
    half = run_fine(**inputs, beta=torch.ones_like(beta), use_beta_sigmoid_in_kernel=True)
    assert all(torch.equal(x, y) for x, y in zip((*found, *logits), (*wanted, *half), strict=True))


def tiny() -> dict[str, torch.Tensor]:
    x = torch.ones(1, 3, 2, 4)
    return {"q": x, "k": x / 2, "v": x, "g": -x[..., 0], "beta": x[..., 0] / 2}


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cu_seqlens_cpu": torch.tensor([0, 3])}, ValueError, "cu_seqlens_cpu: does nothing in .*from cu_seqlens.; leave"),
    ({"chunk_indices": torch.tensor([[0, 0]])}, ValueError, "chunk_indices: does nothing in"),
    ({"cp_context": object()}, ValueError, "cp_context: does nothing in .* not split over devices"),
    ({"head_first": True}, ValueError, "head_first: does nothing in"),
    ({"chunk_sizes": 64}, TypeError, r"rule\(\) got an unexpected keyword argument 'chunk_sizes'"),
    ({"allow_neg_eigval": True}, ValueError, "allow_neg_eigval: doubles a sigmoid, needs use_beta_sigmoid_in_kernel"),
    ({"dt_bias": torch.zeros(2)}, ValueError, "dt_bias: got a tensor, needs None unless use_gate_in_kernel"),
    ({"state_v_first": True, "transpose_state_layout": False}, ValueError, "transpose_state_layout: is the old name"),
    ({"state_v_first": True, "initial_state": torch.zeros(1, 2, 4, 5)}, ValueError,
     r"initial_state: got shape \[1, 2, 4, 5\], needs \[B, HV, V, K\] = \[1, 2, 4, 4\]"),
    ({"initial_state": torch.zeros(1, 2, 4, 4, dtype=torch.int32)}, TypeError, "initial_state: got dtype torch.int32"),
    ({"cu_seqlens": True}, TypeError, "cu_seqlens: got bool, needs a tensor"),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_wrong_arguments_are_named(form: Any) -> None:
    assert_refused(form, [(tiny() | change, *refusal) for change, *refusal in WRONG])


WRONG_GATES: list[tuple[dict[str, Any], str]] = [
    ({"gk": torch.zeros(1, 3, 2)}, r"gk: got shape \[1, 3, 2\], needs \[B, T, HV, K\]"),
    ({"gk": torch.full((1, 3, 2, 4), 0.5)}, "gk: got a log decay of 0.5, needs at most 0"),
    ({"gv": torch.full((1, 3, 2, 4), 0.5)}, "gv: got a log decay of 0.5, needs at most 0"),
    ({"gv": torch.zeros(1, 3, 2, 5)}, r"gv: got shape \[1, 3, 2, 5\], needs \[B, T, HV, V\]"),
    ({"beta": torch.zeros(1, 3, 2, 1)}, r"beta: got shape \[1, 3, 2, 1\], needs \[B, T, HV\] or"),
    ({"gk": torch.zeros(1, 3, 2, 4), "erase": "undecayed"}, "gk: got a tensor, needs None with"),
    ({"gv": torch.zeros(1, 3, 2, 4), "q": torch.ones(1, 3, 4, 4)}, "q: got 4 heads, needs at most the 2 of v"),
    ({"g": None, "use_gate_in_kernel": True, "A_log": torch.zeros(2)}, "g: got None, needs the logits"),
    ({"chunk_size": 64}, "chunk_size: does nothing in fused_recurrent_gated_delta_rule"),
]


def test_wrong_gates_are_named() -> None:
    rows = [(tiny() | change, ValueError, message) for change, message in WRONG_GATES]
    assert_refused(fused_recurrent_gated_delta_rule, rows)


def test_positions_of_flash_linear_attention_are_never_mistaken() -> None:
    """There the fifth and sixth arguments of the recurrence are gk and gv, and the tenth of the chunked form a flag."""
    q, k, v, g, beta = tiny().values()
    with pytest.raises(ValueError, match=r"initial_state: got shape \[1, 3, 2\]"):
        fused_recurrent_gated_delta_rule(q, k, v, g, None, None, beta)
    with pytest.raises(TypeError, match="cu_seqlens: got bool, needs a tensor"):
        chunk_gated_delta_rule(q, k, v, g, beta, None, None, False, False, True)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_arguments_left_at_their_defaults_change_nothing(form: Any) -> None:
    defaults: dict[str, Any] = {
        "scale": None, "initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": False,
        "use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": False, "state_v_first": False, "cu_seqlens": None,
        "use_gate_in_kernel": False, "A_log": None, "dt_bias": None,
    }  # fmt: skip
    if form is chunk_gated_delta_rule:
        defaults |= {"cu_seqlens_cpu": None, "chunk_indices": None, "cp_context": None, "chunk_size": 64}
    else:
        defaults |= {"gk": None, "gv": None}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        o, state = form(**tiny() | defaults)
    assert torch.equal(o, form(**tiny())[0])
    assert state is None


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_the_old_name_of_the_layout(form: Any) -> None:
    inputs = tiny() | {"v": torch.ones(1, 3, 2, 5)}
    _, wanted = form(**inputs, output_final_state=True, state_v_first=True)
    with pytest.warns(DeprecationWarning, match="old name of state_v_first"):
        _, state = form(**inputs, output_final_state=True, transpose_state_layout=True)
    assert torch.equal(state, wanted)
    assert state.shape == (1, 2, 5, 4)


def test_chunk_size_says_what_is_used() -> None:
    drop_in._say_chunk_size.cache_clear()
    wanted, _ = chunk_gated_delta_rule(**tiny())
    with pytest.warns(UserWarning, match="chunk_size=16: chunk_gated_delta_rule uses chunks of 64 tokens"):
        o, _ = chunk_gated_delta_rule(**tiny(), chunk_size=16)
    assert torch.equal(o, wanted)
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        chunk_gated_delta_rule(**tiny(), chunk_size=16)
    for size in (0, 48, "64"):
        with pytest.raises(ValueError, match=f"chunk_size: got {size!r}, needs 16, 32 or 64"):
            chunk_gated_delta_rule(**tiny(), chunk_size=size)


@pytest.mark.parametrize(
    ("K", "dtype", "used"),
    [(64, torch.bfloat16, 64), (64, torch.float32, 32), (8, torch.float16, 32), (64, torch.float64, 64)],
)
def test_chunk_sizes_of_the_kernels(K: int, dtype: torch.dtype, used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drop_in, "capability", lambda device: (9, 0))
    x: Any = SimpleNamespace(shape=(1, 1, 1, K), dtype=dtype, device=None, is_cuda=True)
    assert drop_in._tokens_per_chunk(drop_in.RuleCall(x, x, x, x, x)) == used


def test_plain_calls_are_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> Any:
        raise AssertionError("a plain call was converted")

    monkeypatch.setattr(drop_in, "plain", forbidden)
    for form in FORMS:
        form(**tiny(), initial_state=torch.zeros(1, 2, 4, 4), output_final_state=True)


@pytest.mark.slow
def test_compiles_into_one_graph() -> None:
    inputs = inputs_of("all, packed") | {"cu_seqlens": None, "initial_state": None}
    compiled = torch.compile(chunk_gated_delta_rule, backend="aot_eager", fullgraph=True)
    found, wanted = (results(form, inputs) for form in (compiled, chunk_gated_delta_rule))
    assert_close(found, wanted, 1e-6)
