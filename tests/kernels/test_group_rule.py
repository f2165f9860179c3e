"""The gated delta rule read at boundaries: its forms against the recurrence in float64, and what a query sees.

Without a GPU the Triton kernels run in Triton's interpreter: float32 and float16, small heads.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from deltanet_kernels import chunk_group_gated_delta_rule, naive_gated_delta_rule, naive_group_gated_delta_rule
from deltanet_kernels.group_rule.calls import GroupRuleCall
from tests.kernels.cases import Case, as_double, assert_close, make_inputs, results
from tests.kernels.triton_mode import by_pytorch

CASES = [
    *(Case(f"T={T}", T=T, B=2, H=2) for T in (1, 31, 33, 128)),
    Case("query heads share a state", T=110, B=2, H=1, HQ=3, K=24, V=20),
    Case("value heads share a key head", T=100, H=1, HV=3, K=20, V=40),
    Case("one key head, 4 queries, 2 values", T=70, H=1, HQ=4, HV=2, V=24),
    Case("no norm, no state, scale", T=96, l2norm=False, initial_state=False, scale=-0.7),
    Case("g=0", T=100, g="zero"),
    Case("closed tokens", T=130, H=2, g="tokens"),
    Case("closed at a chunk's last token", T=130, H=2, g="last"),
    Case("g=-inf", T=100, H=2, g="reset"),
    Case("beta=0", T=100, beta="zero"),
    Case("beta=2 on equal keys, gated", T=130, H=2, beta="two", keys="equal", condition=5),
]
pytorch = by_pytorch(chunk_group_gated_delta_rule)


def arguments(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, Any]:
    given = make_inputs(case, dtype, device)
    return {name: given[name] for name in GroupRuleCall._fields if name in given}


@functools.cache
def truth_of(case: Case, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return results(naive_group_gated_delta_rule, as_double(arguments(case, dtype)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pytorch(case: Case) -> None:
    assert_close(results(pytorch, arguments(case, torch.float64)), truth_of(case, torch.float64), 1e-11)
    assert_close(results(pytorch, arguments(case)), truth_of(case), 2e-6 * case.condition)


def test_pytorch_in_bfloat16() -> None:
    """Computed in float32: only the inputs' gradients and the output are rounded."""
    case = CASES[4]
    wanted = truth_of(case, torch.bfloat16)
    assert_close(results(pytorch, arguments(case, torch.bfloat16)), wanted, torch.finfo(torch.bfloat16).eps / 2)


def test_reference_is_the_recurrence_of_the_tokens_before() -> None:
    """One query after n tokens reads what the rule itself reads after them, for every n that begins a group."""
    given = as_double(arguments(Case("prefixes", T=97, H=1, HQ=2)))
    found, state = naive_group_gated_delta_rule(**given)
    norm = {name: given[name] for name in ("scale", "initial_state", "use_qk_l2norm_in_kernel")}
    for start in (32, 64, 96):
        before = {name: given[name][:, :start] for name in ("k", "v", "g", "beta")}
        for t in range(start, min(start + 32, 97)):
            q = given["q"][:, t : t + 1].expand(-1, start, -1, -1)
            wanted, _ = naive_gated_delta_rule(q, **before, **norm)
            torch.testing.assert_close(found[:, t], wanted[:, -1], rtol=1e-12, atol=1e-12)
    wanted = naive_gated_delta_rule(**given)[1]
    torch.testing.assert_close(state, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", [pytorch])
def test_a_query_sees_exactly_the_groups_before_its_own(form: Any) -> None:
    """Gradients of each token's output: zero for its own group and later ones, of every earlier token not."""
    given = arguments(Case("sight", T=130, K=16, scale=1.0))
    o, _ = form(**given)
    for t in (0, 31, 32, 63, 64, 95, 96, 127, 128, 129):
        seen = 32 * (t // 32)
        for name in "kv":
            size = torch.autograd.grad(o[0, t].sum(), given[name], retain_graph=True)[0].abs().sum((0, 2, 3))
            assert not size[seen:].any(), (name, t)
            assert (size[:seen] > 0).all(), (name, t)


def test_refusals() -> None:
    given = arguments(Case("refused", T=33, H=2))
    with pytest.raises(ValueError, match=r"v: got shape \[1, 32, 2, 16\], needs"):
        chunk_group_gated_delta_rule(**given | {"v": given["v"][:, 1:]})
    with pytest.raises(TypeError, match=r"initial_state: got dtype torch\.float64, needs torch\.float32"):
        chunk_group_gated_delta_rule(**given | {"initial_state": given["initial_state"].double()})
