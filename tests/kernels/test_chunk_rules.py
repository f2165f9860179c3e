"""Gradients of one result, strides, refusals and bits of the Triton forms of all rules in chunks.

Without a GPU they run in Triton's interpreter: float32, small heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from deltanet_kernels import (
    chunk_channel_gated_delta_rule,
    chunk_group_gated_delta_rule,
    chunk_mesa,
    naive_channel_gated_delta_rule,
    naive_gated_delta_rule,
    naive_group_gated_delta_rule,
    naive_mesa,
)
from deltanet_kernels.channel_gates.chunk import ChannelForward, channel_chunk_forward
from deltanet_kernels.gated_delta_rule.chunk_forward import ChunkForward, chunk_forward
from deltanet_kernels.group_rule.calls import GroupRuleCall
from deltanet_kernels.group_rule.chunk import GroupForward, chunk_group_triton, group_forward
from deltanet_kernels.mesa.calls import MesaCall
from deltanet_kernels.mesa.chunk import MesaForward, mesa_forward
from tests.kernels.cases import (
    Case,
    as_double,
    assert_close,
    assert_integers_exact,
    assert_repeats,
    make_inputs,
    relative_error,
    results,
)
from tests.kernels.channel_cases import ChannelCase, make_channel_inputs
from tests.kernels.triton_mode import DEVICE, by_triton, triton_chunk

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SMALL = Case("small", T=40, HQ=2)


class Rule(NamedTuple):
    """A Triton form, the recurrence, what makes arguments of both, and the error of the form in float32."""

    form: Callable[..., Any]
    recurrence: Callable[..., Any]
    make: Callable[[Case, torch.dtype, str], dict[str, Any]]
    tolerance: float = 3e-6


def group_inputs(case: Case, dtype: torch.dtype, device: str) -> dict[str, Any]:
    return {name: x for name, x in make_inputs(case, dtype, device).items() if name in GroupRuleCall._fields}


def channel_inputs(case: Case, dtype: torch.dtype, device: str) -> dict[str, Any]:
    sizes = ChannelCase(case.name, case.T, case.B, case.H, case.HQ, case.HV, case.K, case.V, rule="gdn2")
    return make_channel_inputs(sizes, dtype, device)


def mesa_inputs(case: Case, dtype: torch.dtype, device: str) -> dict[str, Any]:
    given = make_inputs(replace(case, initial_state=False), dtype, device)
    ridge = torch.linspace(0.5, 2, case.K, device=device).to(given["g"].dtype).expand(case.others[1], -1)
    given |= {"ridge": ridge.clone().requires_grad_(), "steps": 40}
    return {name: x for name, x in given.items() if name in MesaCall._fields}


def joined(mesa: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The form of the Mesa layer with one tensor of state."""

    def form(**given: Any) -> tuple[Tensor, Tensor]:
        o, final = mesa(**given)
        return o, final if final is None else torch.cat(final, dim=-1)

    return form


def segmented(*tensors: Tensor, **given: Any) -> tuple[Tensor, Tensor | None]:
    """The form by groups with every sequence cut into four segments."""
    return chunk_group_triton(GroupRuleCall(*tensors, **given), 4)


GROUPS = by_triton(chunk_group_gated_delta_rule)
RULES = {
    "gated delta rule": Rule(partial(triton_chunk, segments=1), naive_gated_delta_rule, make_inputs),
    "in segments": Rule(partial(triton_chunk, segments=3), naive_gated_delta_rule, make_inputs),
    **{
        erase: Rule(
            partial(triton_chunk, segments=1), naive_gated_delta_rule,
            lambda case, *place, erase=erase: make_inputs(replace(case, erase=erase), *place),
        )
        for erase in ("off", "undecayed")
    },
    "by groups": Rule(GROUPS, naive_group_gated_delta_rule, group_inputs),
    "by groups, in segments": Rule(segmented, naive_group_gated_delta_rule, group_inputs),
    "by channel": Rule(
        by_triton(chunk_channel_gated_delta_rule), naive_channel_gated_delta_rule, channel_inputs, 1e-5
    ),
    "mesa": Rule(joined(by_triton(chunk_mesa)), joined(naive_mesa), mesa_inputs, 2e-5),
}  # fmt: skip
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@every_rule
@pytest.mark.parametrize("output", ["o", "final_state"])
def test_gradient_of_one_output(rule: Rule, output: str) -> None:
    given = rule.make(SMALL, torch.float32, DEVICE)
    wanted = results(rule.recurrence, as_double(given), (output,))
    assert_close(results(rule.form, given, (output,)), wanted, rule.tolerance)


@every_rule
def test_strides_of_every_kind(rule: Rule) -> None:
    """q, k, v as slices of one tensor, expanded gates, a gradient with zero strides."""
    given = rule.make(replace(SMALL, H=2), torch.float32, DEVICE)
    slices = torch.cat([given[name].detach() for name in "qkv"], dim=-1).split(SMALL.K, dim=-1)
    laid = dict(zip("qkv", slices, strict=True))
    laid |= {name: given[name][:, :1].expand_as(given[name]) for name in ("g", "beta")}
    given |= {name: x.detach().requires_grad_() for name, x in laid.items()}
    assert not any(given[name].is_contiguous() for name in laid)
    answers = []
    for function, arguments in ((rule.form, given), (rule.recurrence, as_double(given))):
        o, _ = function(**arguments)
        leaves = [x for x in arguments.values() if isinstance(x, Tensor) and x.requires_grad]
        answers.append([o, *torch.autograd.grad(o.sum(), leaves)])
    for x, y in zip(*answers, strict=True):
        assert relative_error(x, y) < rule.tolerance


@every_rule
def test_refused_calls_name_the_reason(rule: Rule) -> None:
    for K, V in ((300, 300), (16, 300)):
        with pytest.raises(NotImplementedError, match=f"head sizes {K} and {V}"):
            rule.form(**rule.make(Case("large", T=2, K=K, V=V), torch.float32, DEVICE))
    with pytest.raises(NotImplementedError, match="float64"):
        rule.form(**rule.make(Case("double", T=2), torch.float64, DEVICE))


def sound_calls() -> list[Any]:
    """An operator of each rule, and a call of it."""

    def tensors(rule: str, case: Case, *names: str) -> list[Tensor]:
        given = RULES[rule].make(case, torch.float32, DEVICE)
        return [given[name].detach() for name in ("q", "k", "v", "g", "beta", *names)]

    rows: list[Any] = []
    for segments, case in (
        (1, Case("one", T=20, HQ=2)),
        (4, Case("four", T=20, HQ=2)),
        (1, Case("off", T=20, HQ=2, erase="off")),
        (1, Case("undecayed", T=20, HV=2, V=24, erase="undecayed")),
    ):
        given = tensors("gated delta rule", case, "initial_state")
        rest = (None, None, None, 1.0, True, False, True, True, "ieee", segments, case.erase)
        rows.append((chunk_forward, ChunkForward(*given, *rest)))
    short = Case("short", T=9, HQ=2)
    rows.append((group_forward, GroupForward(*tensors("by groups", short, "initial_state"), 1.0, True, True, True, 4)))
    given = tensors("by channel", short, "erase_key", "initial_state")
    rows.append((channel_chunk_forward, ChannelForward(*given, None, 1.0, True, True, True, "ieee")))
    for keep in (True, False):
        rows.append((mesa_forward, MesaForward(*tensors("mesa", short, "ridge"), None, None, 1.0, 8, True, keep)))
    return rows


def test_registered_operators_are_sound() -> None:
    """Schema and fake implementation agree with what the operator does."""
    for operator, call in sound_calls():
        torch.library.opcheck(operator.op, call, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@pytest.mark.parametrize("K", [64, 128])
@every_rule
def test_many_runs_are_identical(rule: Rule, K: int) -> None:
    dtype = torch.float32 if rule is RULES["mesa"] else torch.bfloat16
    given = rule.make(Case("repeat", T=300, B=2, H=2, K=K), dtype, DEVICE)
    assert_repeats(lambda: results(rule.form, given), 1000 if rule is RULES["gated delta rule"] else 100)


@pytest.mark.gpu
@pytest.mark.parametrize("K", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gated delta rule", "in segments", "by groups", "by groups, in segments"])
def test_integers_bit_for_bit(name: str, K: int, half: torch.dtype) -> None:
    assert_integers_exact(RULES[name].form, RULES[name].recurrence, half, K)
