"""The chunked PyTorch form against the recurrence in float64, forward and every gradient."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deltanet_kernels import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    naive_gated_delta_rule,
    torch_chunk_gated_delta_rule,
)
from tests.kernels.cases import (
    CASES,
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

# PyTorch has no tiles: sizes that choose those of the kernels, and what is a part of another case.
SIMILAR = {
    "T=2", "T=15", "T=63", "long", "K=40", "K=60", "K=96", "K=100", "K=192,V=256", "K=16,V=128", "K=32,V=60", "packed",
    "query heads share a state of narrow values", "query heads share a state", "value heads share a key head",
    "packed, no state", "g=0", "raw gates", "undecayed, T=2", "off, K > V", "undecayed, closed tokens", "off, beta=0",
    "undecayed, beta=0, no state",
}  # fmt: skip


def test_recurrence_is_the_formula_with_its_head_mapping() -> None:
    """Output head j reads state j // (HO/HV) with query head j // (HO/HQ); state i uses key head i // (HV/H)."""
    for HQ, HV in ((2, 6), (6, 2), (4, 4)):
        case = Case("formula", T=5, H=2, HQ=HQ, HV=HV, K=3, V=4, l2norm=True)
        inputs = make_inputs(case, torch.float64)
        o, final = naive_gated_delta_rule(**inputs)
        q, k, v, g, beta, state = (
            inputs[name].detach().numpy()[0] for name in ("q", "k", "v", "g", "beta", "initial_state")
        )
        q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        HO = max(HQ, HV)
        for j in range(HO):
            i, query = j // (HO // HV), j // (HO // HQ)
            key = i // (HV // 2)
            S = state[i].copy()
            for t in range(case.T):
                S = np.exp(g[t, i]) * S
                S = S + beta[t, i] * np.outer(k[t, key], v[t, i] - k[t, key] @ S)
                np.testing.assert_allclose(o[0, t, j].detach(), q[t, query] @ S / 3**0.5, rtol=1e-12)
            np.testing.assert_allclose(final[0, i].detach(), S, rtol=1e-12)


@pytest.mark.parametrize("case", [c for c in (*CASES, *ERASE_CASES) if c.name not in SIMILAR], ids=str)
def test_chunked_form(case: Case) -> None:
    """To 13 digits in float64, and to the rounding of float32 in float32."""
    inputs, wanted = make_inputs(case), truth_of(case)
    assert_close(results(torch_chunk_gated_delta_rule, as_double(inputs)), wanted, 1e-13 * case.condition)
    found = results(chunk_gated_delta_rule, inputs)
    assert all(x.dtype == torch.float32 for x in found.values())
    assert_close(found, wanted, 2e-6 * case.condition)


def test_low_precision_inputs_are_computed_in_float32() -> None:
    dtype = torch.bfloat16
    inputs = make_inputs(Case("low", T=70, B=2, H=2, HQ=4, HV=2), dtype)
    o, state = chunk_gated_delta_rule(**inputs)
    assert o.dtype == dtype
    assert state.dtype == torch.float32
    wide = {name: x.float() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    expected, expected_state = chunk_gated_delta_rule(**wide)
    torch.testing.assert_close(o, expected.to(dtype), rtol=0, atol=0)
    torch.testing.assert_close(state, expected_state, rtol=0, atol=0)
    found = results(chunk_gated_delta_rule, inputs)
    assert [found[f"d{x}"].dtype for x in "qkv"] == [dtype] * 3
    assert_close(found, truth(inputs), 1e-2)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 140), min_size=1, max_size=4),
    extra=st.integers(1, 5),
    H=st.integers(1, 2),
    groups=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 4), (4, 2), (3, 3)]),
    K=st.integers(1, 9),
    V=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
def test_any_packing_of_any_shape(
    lengths: list[int], extra: int, H: int, groups: tuple[int, int], K: int, V: int, seed: int
) -> None:
    offsets = (0, *np.cumsum(lengths).tolist())
    case = Case("any", T=offsets[-1] + extra, H=H, HQ=H * groups[0], HV=H * groups[1], K=K, V=V, cu_seqlens=offsets)
    inputs = make_inputs(case, torch.float64, seed=seed)
    with torch.no_grad():
        found, wanted = (
            dict(zip(("o", "state"), f(**inputs), strict=True))
            for f in (torch_chunk_gated_delta_rule, naive_gated_delta_rule)
        )
    assert_close(found, wanted, 1e-13)


@pytest.mark.parametrize("outputs", [("final_state",), ("o",)], ids=["state only", "output only"])
def test_gradient_of_one_result_only(outputs: tuple[str, ...]) -> None:
    inputs = make_inputs(Case("one", T=70, B=2, H=2))
    assert_close(results(chunk_gated_delta_rule, inputs, outputs), truth(inputs, outputs), 2e-6)


def test_expanded_gradients() -> None:
    """`.sum()` hands down gradients with stride 0."""
    inputs = make_inputs(Case("expanded", T=70, B=2, H=2, HQ=4))
    double = as_double(inputs)
    gradients = []
    for function, arguments in ((chunk_gated_delta_rule, inputs), (naive_gated_delta_rule, double)):
        o, state = function(**arguments)
        leaves = [arguments[name] for name in ("q", "k", "v", "g", "beta", "initial_state")]
        gradients.append(torch.autograd.grad(o.sum() + 2 * state.sum(), leaves))
    for found, wanted in zip(*gradients, strict=True):
        assert relative_error(found, wanted) < 2e-6


def test_strided_inputs() -> None:
    """Heads before tokens, as attention code holds them."""
    inputs = make_inputs(Case("strided", T=70, B=2, H=2))
    strided = {
        name: x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() if name in ("q", "k", "v", "g")
        else x for name, x in inputs.items()
    }  # fmt: skip
    assert_close(results(chunk_gated_delta_rule, strided), results(chunk_gated_delta_rule, inputs), 1e-6)


def test_same_result_with_and_without_gradients() -> None:
    inputs = make_inputs(Case("modes", T=150, B=2, H=2))
    o, state = chunk_gated_delta_rule(**inputs)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            again, again_state = chunk_gated_delta_rule(**inputs)
        assert torch.equal(o, again)
        assert torch.equal(state, again_state)


def test_inputs_are_left_alone() -> None:
    inputs = make_inputs(Case("intact", T=70, H=2))
    before = {name: x.detach().clone() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    results(chunk_gated_delta_rule, inputs)
    with torch.no_grad():
        fused_recurrent_gated_delta_rule(**{**inputs, **{n: inputs[n][:, :1] for n in ("q", "k", "v", "g", "beta")}})
    for name, x in before.items():
        assert torch.equal(x, inputs[name]), name


def test_final_state_only_on_request() -> None:
    inputs = make_inputs(Case("request", T=3)) | {"output_final_state": False}
    for function in (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, naive_gated_delta_rule):
        with torch.no_grad():
            assert function(**inputs)[1] is None


def test_padding_tokens_do_not_leak() -> None:
    """Tokens after the last offset: zero output, no gradient, whatever they hold."""
    inputs = make_inputs(Case("padding", T=80, H=2, cu_seqlens=(0, 40, 75)))
    for name in ("q", "k", "v", "g", "beta"):
        inputs[name] = inputs[name].detach().index_fill(1, torch.arange(75, 80), torch.nan).requires_grad_()
    found = results(chunk_gated_delta_rule, inputs)
    assert (found["o"][:, 75:] == 0).all()
    for name in ("q", "k", "v", "g", "beta"):
        assert (found[f"d{name}"][:, 75:] == 0).all(), name
        assert found[f"d{name}"].isfinite().all(), name
    assert found["final_state"].isfinite().all()


@pytest.mark.parametrize(
    ("T", "groups", "raw", "erase"),
    [
        (1, (2, 4), False, "decayed"), (1, (4, 2), True, "decayed"), (8, (2, 4), True, "decayed"),
        (9, (2, 2), True, "decayed"), (70, (4, 2), False, "decayed"),
        (1, (4, 2), True, "off"), (7, (4, 2), True, "off"),
        (1, (4, 2), True, "undecayed"), (7, (4, 2), True, "undecayed"),
    ],
)  # fmt: skip
def test_recurrent_form(T: int, groups: tuple[int, int], raw: bool, erase: str) -> None:
    case = Case("recurrent", T=T, B=2, H=2, HQ=groups[0], HV=groups[1], K=16, V=24, raw=raw, erase=erase)
    inputs = make_inputs(case)
    wanted = truth(inputs)
    assert_close(results(fused_recurrent_gated_delta_rule, inputs), wanted, 2e-6)
    with torch.no_grad():
        o, state = fused_recurrent_gated_delta_rule(**inputs)
    assert relative_error(o, wanted["o"]) < 2e-6
    assert relative_error(state, wanted["final_state"]) < 2e-6


def test_recurrent_form_of_packed_single_tokens() -> None:
    inputs = make_inputs(Case("decode", T=3, H=2, cu_seqlens=(0, 1, 2, 3)))
    assert_close(results(fused_recurrent_gated_delta_rule, inputs), truth(inputs), 2e-6)


def test_erase_terms_are_the_formula() -> None:
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
