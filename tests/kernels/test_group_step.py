"""One token beside a state of what has left its window: the kernel against the PyTorch form, and that against the rule.

Without a GPU the kernel runs in Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deltanet_kernels import (
    group_gated_delta_step_,
    group_gates,
    naive_gated_delta_rule,
    pack_prompt,
    round_state,
    round_tokens,
)
from deltanet_kernels.group_rule.calls import KEPT, GroupStepCall
from deltanet_kernels.packed_cache.calls import PackedStepCall
from deltanet_kernels.packed_cache.layout import PackedKeyValues
from support.refusals import assert_refused
from tests.kernels.triton_mode import DEVICE, by_pytorch, by_triton

GROUPS, D = 2, 64  # the window's; tokens 96 and 128 are the first before which a group leaves
pytorch, triton = by_pytorch(group_gated_delta_step_), by_triton(group_gated_delta_step_)


def step(
    tokens: tuple[int, ...] = (64, 96, 100, 160),
    heads: tuple[int, int, int] = (4, 2, 1),
    bits: int = 4,
    ordered: bool = True,
    turned: int = D,
    int8: bool = True,
    gated: bool = True,
    turns_back: bool = False,
    dtype: torch.dtype = torch.float32,
    sinks: int = 4,
    groups: int = GROUPS,
) -> GroupStepCall:
    """A call on CPU, of sequences of so many tokens and so many query heads, states and key heads."""
    make = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make)

    (HQ, H, HK), B = heads, len(tokens)
    order = torch.stack([torch.randperm(D, generator=make) for _ in range(HK)]) if ordered else None
    if order is not None:
        order = torch.stack([order, order.argsort(-1)], 1)
    caches = []
    for length in tokens:
        k, v = round_tokens(normal(1, length, HK, D).to(dtype), normal(1, length, HK, D).to(dtype))
        caches.append(pack_prompt(k, v, bits, groups, None, order)[0].tensors)
    cache = PackedKeyValues(*(torch.cat(parts) for parts in zip(*caches, strict=True)), order)  # type: ignore[call-arg]
    codes, scale = torch.randint(-127, 128, (B, H, D, D), generator=make), normal(B, H, D).abs() / 127
    places = 32 * (groups + 1)
    waiting = (-normal(B, places, H).abs() / 8).bfloat16(), normal(B, places, H).sigmoid().bfloat16()
    angle = normal(B, 1, turned)
    rotation = (angle.cos().to(dtype), angle.sin().to(dtype)) if turned else (None, None)
    state = (codes.to(torch.int8), scale) if int8 else ((codes * scale.unsqueeze(-1)).bfloat16(), None)
    back = normal(1, 1, turned)
    turn = (back.cos().to(dtype), back.sin().to(dtype)) if turns_back else (None, None)
    token = PackedStepCall(
        *(normal(B, 1, heads, D).to(dtype) for heads in (HQ, HK, HK)), cache, 32 * groups + 1, sinks, None, 0.3, None,
        *rotation, edge=32, turn_cos=turn[0], turn_sin=turn[1],
    )  # fmt: skip
    z, norm_weight = (normal(B, 1, HQ, D).to(dtype), normal(HQ, D).to(dtype)) if gated else (None, None)
    return GroupStepCall(
        normal(B, 1, H).to(dtype), normal(B, 1, H).to(dtype), normal(H), normal(H), token, *waiting, *state,
        normal(B, 1, HQ).to(dtype), normal(HQ), normal(HQ), z, norm_weight, 1e-6, 2,
    )  # fmt: skip


def copied(call: Any, device: str = "cpu") -> Any:
    """The call with tensors of its own, those of calls within it too."""
    if isinstance(call, tuple):
        return type(call)(*(copied(x, device) for x in call))
    return call.clone().to(device) if isinstance(call, Tensor) else call


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ordered": False, "turned": 0, "heads": (2, 2, 2), "gated": False},
        {"bits": 8, "ordered": False, "turned": 32, "int8": False, "heads": (4, 4, 2), "turns_back": True},
        {"dtype": torch.float16, "turned": 0, "heads": (3, 1, 1), "sinks": 0},
    ],
    ids=str,
)
@pytest.mark.usefixtures("rounding_to_nearest")
def test_the_kernel(changes: dict[str, Any]) -> None:
    call = step(**changes)
    ours, theirs = copied(call, DEVICE), copied(call)
    found, wanted = triton(*ours), pytorch(*theirs)
    precision = 2e-3 if call.token.q.dtype == torch.float16 else 5e-6  # of a packed step
    torch.testing.assert_close(found.cpu(), wanted, rtol=precision, atol=precision)
    for name in ("g", "beta"):
        torch.testing.assert_close(getattr(ours, name).cpu(), getattr(theirs, name), rtol=0, atol=0)
    for x, other in zip(ours.token.cache.tensors, theirs.token.cache.tensors, strict=True):
        torch.testing.assert_close(x.cpu(), other, rtol=0, atol=0)
    if call.state_scale is None:
        torch.testing.assert_close(ours.state.cpu(), theirs.state)
    else:  # a number in the middle of two may be rounded to either
        assert theirs.state_scale is not None
        torch.testing.assert_close(ours.state_scale.cpu(), theirs.state_scale)
        assert (ours.state.cpu().int() - theirs.state.int()).abs().max() <= 1
        assert (ours.state.cpu() != theirs.state).float().mean() < 1e-3


@pytest.mark.parametrize("step_", [pytorch, triton], ids=["torch", "triton"])
@pytest.mark.parametrize("changes", [{}, {"int8": False, "ordered": False, "heads": (2, 2, 2)}], ids=str)
def test_sequences_in_rows_of_larger_tensors(step_: Any, changes: dict[str, Any], poisoned_memory: None) -> None:
    """By index, beside others that share the row 0, they are as in tensors of their own."""
    call = copied(step(tokens=(64, 96, 100, 96, 160), **changes), DEVICE)
    indices, sequences = torch.tensor([5, 2, 4, 0, 0], dtype=torch.int32, device=DEVICE), slice(3)
    made = []

    def spread(x: Tensor) -> Tensor:
        """Rows 5, 2 and 4 are those of the first sequences; others, and what lies between rows, are 77."""
        made.append(torch.full((7, 2 * x[0].numel()), 77, device=DEVICE).to(x.dtype))
        rows = made[-1][:, : x[0].numel()].view(-1, *x.shape[1:])
        rows[indices[sequences].long()] = x[sequences]
        return rows

    def moved(read: Any, change: Any) -> GroupStepCall:
        """The call with `read` of what it has of each token, and `change` of the tensors that it changes."""
        token = call.token
        cache = token.cache.with_tensors(map(change, token.cache.tensors))
        token = token._replace(
            cache=cache, **{name: read(getattr(token, name)) for name in ("q", "k", "v", "cos", "sin")}
        )
        read_names, names = ("a", "b", "share_logit", "z"), [name for name in KEPT if getattr(call, name) is not None]
        parts = {name: read(getattr(call, name)) for name in read_names}
        return call._replace(token=token, **parts, **{name: change(getattr(call, name)) for name in names})

    alone = copied(moved(lambda x: x[sequences], lambda x: x[sequences]), DEVICE)
    wide = moved(lambda x: x, spread)
    wide = wide._replace(token=wide.token._replace(state_indices=indices))
    found, wanted = step_(*wide), step_(*alone)
    assert found.isfinite().all()
    torch.testing.assert_close(found[sequences], wanted, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(changing(wide), changing(alone), strict=True):
        torch.testing.assert_close(ours[indices[sequences].long()], theirs, rtol=0, atol=0)
    for held, x in zip(made, changing(wide), strict=True):
        assert (held[:, x[0].numel() :] == 77).all()
        assert (held[[1, 3, 6]] == 77).all()


def changing(call: GroupStepCall) -> list[Tensor]:
    """The tensors that a step changes."""
    return [*call.token.cache.tensors, *(x for name in KEPT if (x := getattr(call, name)) is not None)]


@pytest.mark.parametrize("by", [by_pytorch, by_triton])
def test_a_state_is_rounded_to_127_steps_of_the_largest_number_of_a_row(by: Any) -> None:
    state = torch.tensor([[[[1.27, -0.634, 0.016, -0.016], [0.0, 0.0, 0.0, 0.0]]]], device=DEVICE)
    codes, scale = by(round_state)(state)
    assert codes.dtype == torch.int8
    assert codes.tolist() == [[[[127, -63, 2, -2], [0, 0, 0, 0]]]]
    torch.testing.assert_close(scale.cpu(), torch.tensor([[[0.01, 0.0]]]))


def test_the_states_that_a_prompt_leaves_are_rounded_as_in_pytorch() -> None:
    state = torch.randn(2, 3, 100, 72, generator=torch.Generator().manual_seed(3))  # the last program has few rows
    (ours, scale), (theirs, wanted) = by_triton(round_state)(state.to(DEVICE)), by_pytorch(round_state)(state)
    assert torch.equal(scale.cpu(), wanted)
    assert (ours.cpu().int() - theirs.int()).abs().max() <= 1  # in the middle of two, either
    assert (ours.cpu() != theirs).float().mean() < 1e-3


def test_only_where_a_group_leaves_the_state_changes() -> None:
    call = step(tokens=(64, 95, 96, 127, 128))
    before = call.state.clone()
    group_gated_delta_step_(*call)
    assert [bool((x != y).any()) for x, y in zip(before, call.state, strict=True)] == [False, False, True, False, True]


def test_what_is_refused() -> None:
    call, gates = step(), torch.zeros(1, 9, 2)
    token = call.token
    empty = PackedKeyValues(*(x[:, :, :0] for x in token.cache[:4]), *token.cache[4:])  # type: ignore[arg-type]
    rows: list[tuple[Any, type[Exception], str]] = [
        ({"token": token._replace(window=33)}, ValueError, "got window=33 and edge=32 of 2 groups, needs 65 and 32"),
        ({"token": token._replace(q=token.q[:, :, :3])}, ValueError, "got 3 query heads, 2 states, 1 key heads and 2"),
        ({"token": token._replace(cache=empty, window=1)}, ValueError, "1 key heads and 0 groups; each number"),
        ({"state_scale": None}, TypeError, "state: got dtype torch.int8, needs torch.int8 with a state_scale and only"),
        ({"beta": call.beta.float()}, TypeError, "beta: got dtype torch.float32, needs torch.bfloat16"),
        ({"max_strength": 3}, ValueError, "max_strength: got 3, needs 1 or 2"),
    ]
    assert_refused(lambda **changes: group_gated_delta_step_(*call._replace(**changes)), rows)
    bounds = torch.tensor([0, 2])
    logits = torch.zeros(1, 2, 1), torch.zeros(1, 2, 1), torch.zeros(1), torch.zeros(1)
    with pytest.raises(ValueError, match="length: got a tensor beside cu_seqlens, needs None"):
        group_gates(*logits, 1, 4, torch.tensor([1]), cu_seqlens=bounds, longest=2)
    with pytest.raises(ValueError, match="longest: got 3, needs the most tokens of a sequence"):
        group_gates(*logits, 1, 4, cu_seqlens=bounds, longest=3)
    with pytest.raises(ValueError, match="groups: got -1, needs at least 0"):
        group_gates(gates, gates, gates[0, 0], gates[0, 0], -1, 4)


def test_the_operators_are_registered_consistently() -> None:
    from deltanet_kernels.group_rule.chunk import GroupForward, group_forward
    from deltanet_kernels.group_rule.gates import group_gates_op
    from deltanet_kernels.group_rule.round_state import round_state_op
    from deltanet_kernels.group_rule.step import group_step_op_

    x, gate = torch.randn(1, 70, 2, 16, device=DEVICE), torch.zeros(1, 70, 2, device=DEVICE)
    row = torch.tensor([0, 30, 70], device=DEVICE)
    for bounds in (None, row):
        gates = gate, gate, gate[0, 0], gate[0, 0], 1, 4, None, 1, bounds, 40
        torch.library.opcheck(group_gates_op.op, gates)
        forward = GroupForward(x, x, x, gate, gate, None, 0.25, True, True, False, 1, bounds)
        torch.library.opcheck(group_forward.op, group_forward.flat(forward))
    torch.library.opcheck(round_state_op.op, (torch.randn(1, 2, 3, 4, device=DEVICE),))
    torch.library.opcheck(group_step_op_.op, group_step_op_.flat(copied(step(tokens=(96,)), DEVICE)))


def test_the_leaving_group_is_written_by_the_rule_without_sinks() -> None:
    """The first group that leaves, into a state of zeros, from the numbers that its codes stand for."""
    call = step(tokens=(96,), ordered=False, int8=False)
    call.state.zero_()
    q, k, v = (x.double() for x in call.token[:3])
    held = call._replace(state=call.state.double(), token=call.token._replace(q=q, k=k, v=v))
    from deltanet_kernels.packed_cache.layout import unpacked

    k, v = (x.transpose(1, 2)[:, :32].repeat_interleave(2, 2) for x in unpacked(call.token.cache[:4], torch.float64))
    k, v = k[:, 4:], v[:, 4:]
    g, beta = (x[:, 4:32].double() for x in (call.g, call.beta))
    _, wanted = naive_gated_delta_rule(k, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
    pytorch(*held)
    torch.testing.assert_close(held.state, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("rounding_to_nearest")
@pytest.mark.parametrize(
    ("T", "groups", "length"), [(200, 2, None), (200, 2, 128), (200, 2, 129), (40, 3, None), (97, 0, None)]
)
def test_the_gates_of_a_prompt(T: int, groups: int, length: int | None, poisoned_memory: None) -> None:
    make = torch.Generator().manual_seed(2)
    a, b = (torch.randn(2, T, 3, generator=make) for _ in range(2))
    A_log, dt_bias = torch.randn(3, generator=make), torch.randn(3, generator=make)
    end = None if length is None else torch.tensor([length])
    rest = (groups, 4, end, 2)
    wanted = by_pytorch(group_gates)(a, b, A_log, dt_bias, *rest)
    given = (x.to(DEVICE) for x in (a, b, A_log, dt_bias))
    found = by_triton(group_gates)(*given, groups, 4, None if end is None else end.to(DEVICE), 2)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=2e-6, atol=1e-7)
    last = T if length is None else length
    left = max(0, (last - 1) // 32 - groups) * 32
    strength = (2 * b.sigmoid()).bfloat16()
    g, beta, _, waiting = wanted
    assert g.shape == beta.shape == (2, max(T - 32 * groups, 0), 3)
    torch.testing.assert_close(beta[:, 4:left].bfloat16(), strength[:, 4:left])
    assert not beta[:, :4].any()
    assert not beta[:, left:].any()
    places = 32 * (groups + 1)
    for n in range(max(0, last - places), last):
        torch.testing.assert_close(waiting[:, n % places], strength[:, n])
    assert int((waiting != 0).any(-1).sum()) == 2 * min(last, places)


@pytest.mark.usefixtures("rounding_to_nearest")
@pytest.mark.parametrize("by", [by_pytorch, by_triton])
@pytest.mark.parametrize("groups", [0, 1, 3])
def test_the_gates_of_sequences_in_one_row(by: Any, groups: int, poisoned_memory: None) -> None:
    """As of each alone; those of tokens in a window, and of sinks, are 0."""
    lengths = (1, 129, 0, 33, 3, 32, 31, 97, 2)
    make = torch.Generator().manual_seed(2)
    a, b = (torch.randn(1, sum(lengths), 12, generator=make).to(DEVICE)[..., :9] for _ in range(2))
    gate = [torch.randn(9, generator=make).to(DEVICE) for _ in range(2)]
    bounds = torch.tensor([0, *lengths], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)
    *written, waiting_g, waiting_beta = by(group_gates)(a, b, *gate, groups, 4, None, 2, bounds, 129)
    assert written[0].shape == written[1].shape == (1, sum(lengths) - 32 * groups, 9)
    for n, (start, length) in enumerate(zip(bounds.tolist(), lengths, strict=False)):
        held = waiting_g[n : n + 1], waiting_beta[n : n + 1]
        if not length:
            assert not any(x.any() for x in held)
            continue
        own = slice(start, start + length)
        *alone, wait_g, wait_beta = by(group_gates)(a[:, own], b[:, own], *gate, groups, 4, None, 2)
        assert torch.equal(held[0], wait_g)
        assert torch.equal(held[1], wait_beta)
        for ours, theirs in zip(written, alone, strict=True):
            assert torch.equal(ours[:, own][:, : theirs.shape[1]], theirs)
            assert not ours[:, own][:, theirs.shape[1] :].any()
