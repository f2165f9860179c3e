"""The state of what has left the window: the tokens that queries no longer see, and no others.

Tokens of a sequence are numbered from 0 and lie in groups of 32, as a packed cache holds them. A query of group c sees
its own group up to itself, the N groups before, and the sinks. It reads a state that holds the tokens of all groups
before these, without the sinks:

    o_t = D^-0.5 q_t^T S_{t // 32 - N}        S_i = 0 for i <= 0;  S_{i+1} is S_i after the writes of group i

So a token is seen exactly or remembered, never both. The state changes once in 32 tokens; between two changes a
decoding step only reads it. Keys and values are the window's own, rotated, and rounded as its cache keeps them
(`delayed_window.py`). The gates of a token wait beside them until its group leaves. Beside the window's cache a layer
keeps

    state, ...     the rule's state; in int8 its codes, rounded once a group, and state_scale of each row
    gate_0, ...    the gates of the tokens in the window, bfloat16: token n in the place n % 32 (N + 1)

Shapes: B batch, T tokens of a call, L tokens that the state may get, N groups before a query's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from deltanet_hf.mixers.cache.state import State, TensorShape
from deltanet_hf.mixers.layer.delayed_window import Leaving, leaving
from deltanet_hf.mixers.layer.layer_call import Angles, LayerCall, MixCall, Projected, window_angles
from deltanet_hf.mixers.layer.token_order import along, padding_last, placed, reordered
from deltanet_kernels import round_state
from deltanet_kernels.group_rule.calls import RoundStateCall

if TYPE_CHECKING:
    from deltanet_hf.mixers.layer.mixer import Mixer
    from deltanet_hf.mixers.layer.window_branch import WindowBranch

SCALE = "state_scale"
Mix = Callable[[MixCall], tuple[Tensor, State]]


def delayed(
    mixer: Mixer,
    projected: Projected,
    position_embeddings: Angles | None,
    call: LayerCall,
) -> tuple[Tensor, State]:
    """As `Mixer.attend`."""
    x = projected.x
    if call.padding is not None and call.state is None and not call.keep_state:
        # Behind the tokens of its row, padding changes nothing.
        order, place = padding_last(call.padding.expand(x.shape[:2]))
        angles = (position_embeddings or (None, None))[:6]  # a seventh tensor is for whole heads
        rows = (part if part is None else part.expand(len(x), -1, -1) for part in angles)
        turned = tuple(None if part is None else reordered(part, order) for part in rows)
        moved = Projected(*(None if part is None else reordered(part, order) for part in projected))  # type: ignore[arg-type]
        output, _ = delayed(mixer, moved, None if position_embeddings is None else turned, replace(call, padding=None))  # type: ignore[arg-type]
        return reordered(output, place), {}
    branch = mixer.window_branch
    assert branch is not None
    assert projected.mixing_logits is not None
    tokens, gates = branch.tokens(x, call), tuple(map(as_waiting, mixer.gates(projected, call.padding)))
    # Beyond the teacher's positions, too, the state keeps the rotation: it shows distances alone, and the gates forget.
    own, turn = None, None
    if position_embeddings is not None:
        own, turn = window_angles(position_embeddings, mixer.sink_bound, call.cache, x.shape[1])
    q, k, v = mixer.window_inputs(projected, own)
    left = leaving(branch, q, k, v, call, tokens, turn)
    kept = tokens if call.prompt_length is None else tokens.until(call.prompt_length)
    numbers = kept.numbers.long().expand(len(x), -1) - 1
    reads, state = _recalled(mixer, q, left, gates, call, numbers)
    if call.keep_state:
        state |= _waiting(call, gates, numbers, branch.places)
    state_output = mixer.gated_norm(reads, projected.gate)
    output = branch.mixture(projected.mixing_logits, left.window_output, left.lse, state_output, tokens.numbers)
    return output, {**state, **left.state}


def _recalled(
    mixer: Mixer, q: Tensor, left: Leaving, gates: tuple[Tensor, ...], call: LayerCall, numbers: Tensor
) -> tuple[Tensor, State]:
    """The reads [B, T, HO, D] of the state, and that state after the call (empty unless it is kept).

    Args:
        q, gates: of the tokens of the call [B, T, ...]; numbers: theirs [B, T], from 0; -1 at padding.
    """
    branch, before = mixer.window_branch, call.state
    assert branch is not None
    if left.keys is None or left.values is None:
        assert before is not None
        memory, still = held_memory(mixer, before), q.new_zeros(len(q), 1, mixer.num_states, mixer.head_dim)
        reads = read_only(mixer.mix, mixer.activated(q, still, still)[0], still, gates, memory)
        return reads, {name: before[name] for name in (*memory, SCALE) if name in before}
    parts = mixer.repeated(q.flatten(2), left.keys.flatten(2), left.values.flatten(2))
    q, k, v = mixer.activated(*map(mixer.split_heads, parts))
    inputs = MixCall(q, k, v, gates, None, None, call.keep_state, call.cu_seqlens)
    if call.cu_seqlens is not None:
        reads, memory = read_packed(mixer.mix, inputs.in_one_row(), branch)
        reads = reads.view(*q.shape[:2], mixer.num_heads, -1)
    elif left.base is None:
        reads, memory = read_rows(mixer.mix_groups, inputs, branch, call.prompt_length)
    else:
        first = (left.base * branch.edge)[:, None]
        inputs = inputs._replace(
            gates=tuple(by_number(_held(before, i), gate, numbers, first, k.shape[1]) for i, gate in enumerate(gates)),
            state=None if before is None else held_memory(mixer, before),
        )
        reads, memory = read_leaving(mixer.mix_groups, inputs, numbers, left.base, branch)
    return reads, stored_memory(mixer, memory)


def _held(before: State | None, index: int) -> Tensor | None:
    """The gates that wait before the call."""
    return None if before is None else before[f"gate_{index}"]


def _waiting(call: LayerCall, gates: tuple[Tensor, ...], numbers: Tensor, places: int) -> State:
    """The gates that wait after the call."""
    bounds = call.cu_seqlens
    return {
        f"gate_{i}": waiting(_held(call.state, i), gate, numbers, places)
        if bounds is None
        else waiting_of_packed(gate, bounds.long(), places)
        for i, gate in enumerate(gates)
    }


def held_memory(mixer: Mixer, state: State) -> State:
    """The state of the rule, as `Mixer.mix` takes it."""
    memory = {name: state[name] for name in mixer.recurrent_shapes()}
    if SCALE in state:
        memory["state"] = state["state"] * state[SCALE].unsqueeze(-1)
    return memory


def stored_memory(mixer: Mixer, memory: State) -> State:
    """The state of the rule as the cache keeps it: the inverse of `held_memory`."""
    if not memory or mixer.settings.state_dtype != "int8":
        return memory
    codes, scale = round_state.unchecked(RoundStateCall(memory["state"].detach()))
    return {**memory, "state": codes, SCALE: scale}


@torch.no_grad()
def waiting_shapes(mixer: Mixer) -> dict[str, TensorShape]:
    """The tensors that a layer keeps beside its window and the rule's state."""
    branch, weight = mixer.window_branch, mixer.q_proj.weight
    assert branch is not None
    gates = mixer.gates(mixer.project(weight.new_zeros(1, 1, weight.shape[1])), None)
    shapes = {
        f"gate_{i}": TensorShape((branch.places, *gate.shape[2:]), torch.bfloat16) for i, gate in enumerate(gates)
    }
    if mixer.settings.state_dtype == "int8":
        heads, rows, _ = mixer.recurrent_shapes()["state"].shape
        shapes[SCALE] = TensorShape((heads, rows), torch.float32)
    return shapes


def read_packed(mix: Mix, call: MixCall, branch: WindowBranch) -> tuple[Tensor, State]:
    """The reads [1, T, HO, D] of sequences packed into one row, and their states; arguments as in `read_rows`."""
    cu_seqlens, length, group_size, groups = call.cu_seqlens, call.q.shape[1], branch.edge, branch.groups
    assert cu_seqlens is not None
    lengths = cu_seqlens.diff().long()
    # A sequence has a part of 64 places for each group that leaves before its end, and one more: queries, then writes,
    # as in `read_groups`. Places behind the last part are those of tokens that have none.
    leaving = (lengths - 1) // group_size - groups
    begins = F.pad((leaving.clamp_min(0) + 1).cumsum(0), (1, 0)) * (2 * group_size)
    room = 2 * group_size * (length // group_size + len(lengths))
    token = torch.arange(length, device=call.q.device)
    sequence = torch.searchsorted(cu_seqlens[1:].long().contiguous(), token, right=True).clamp_max(len(lengths) - 1)
    number = token - cu_seqlens.long()[sequence]
    group, place = number // group_size, number % group_size
    begin, reads = begins[sequence], (group >= groups) & (token < cu_seqlens[-1])
    writes = (group < leaving[sequence]) & (number >= branch.sinks)
    at_q = (begin + (group - groups) * 2 * group_size + place).where(reads, room)
    at_k = (begin + group * 2 * group_size + group_size + place).where(writes, room)

    q = placed(call.q, at_q[None], room)
    k, v, *gates = (placed(x, at_k[None], room) for x in (call.k, call.v, *call.gates))
    output, state = mix(MixCall(q, k, v, tuple(gates), None, None, call.keep_state, begins.to(cu_seqlens.dtype)))
    return F.pad(output, (0, 0, 0, 0, 0, 1))[:, at_q].masked_fill(~reads[:, None, None], 0.0), state


def read_rows(
    read: Mix, call: MixCall, branch: WindowBranch, prompt_length: Tensor | None = None
) -> tuple[Tensor, State]:
    """The reads [B, T, HO, D] of whole sequences, one a row, 0 where nothing has left the window; and their state.

    Args:
        read: `Mixer.mix_groups`.
        call: queries, keys, values and gates of the tokens, all by the tokens' own places.
        branch: the window, which says N and the sinks: first tokens, which are never written.
        prompt_length: [1], see `LayerCall`.
    """
    hidden = branch.window - 1
    length = call.q.shape[1] - hidden
    if length <= 0:
        reads = call.q.new_zeros(*call.q.shape[:3], call.v.shape[3])
        still = call._replace(gates=tuple(torch.zeros_like(gate) for gate in call.gates))
        return reads, read(still)[1] if call.keep_state else {}
    last = length - 1 if prompt_length is None else prompt_length - hidden - 1
    left = last // branch.edge * branch.edge  # before the last token's window
    gates = tuple(written(gate[:, :length], branch.sinks, left) for gate in call.gates)
    own = MixCall(call.q[:, hidden:], call.k[:, :length], call.v[:, :length], gates, None, None, call.keep_state)
    output, state = read(own)
    return F.pad(output, (0, 0, 0, 0, hidden, 0)), state


def read_leaving(read: Mix, call: MixCall, numbers: Tensor, base: Tensor, branch: WindowBranch) -> tuple[Tensor, State]:
    """The reads [B, T, HO, D] of the next tokens of sequences, and the state after them.

    Args:
        read, branch: as in `read_rows`.
        call: queries [B, T, ...] in any order; keys, values and gates [B, L, ...] by number; `state` is that
            before `base`, or None.
        numbers: of the queries [B, T], from 0; -1 at padding.
        base: [B] int64, the group of the first of these, before which the state stands.
    """
    group_size, groups = branch.edge, branch.groups
    last = numbers.amax(1) // group_size
    left = ((last - groups - base) * group_size)[:, None]  # the writes of the call
    token = base[:, None] * group_size + torch.arange(call.k.shape[1], device=numbers.device)
    place = torch.arange(call.k.shape[1], device=numbers.device)
    stays = (place >= left) | (token < branch.sinks)
    gates = tuple(gate.masked_fill(stays.view(*stays.shape, *[1] * (gate.dim() - 2)), 0.0) for gate in call.gates)
    at = numbers - (base + groups)[:, None] * group_size
    reads_state = (numbers >= 0) & (at >= 0)
    at = at.where(reads_state, call.k.shape[1])
    q = placed(call.q, at, call.k.shape[1])
    output, state = read(MixCall(q, call.k, call.v, gates, None, call.state, call.keep_state))
    return reordered(F.pad(output, (0, 0, 0, 0, 0, 1)), at).masked_fill(~reads_state[:, :, None, None], 0.0), state


def read_groups(mix: Mix, call: MixCall, group_size: int) -> tuple[Tensor, State]:
    """Queries of group i read the state before the writes of group i; the rest is as in `Mixer.mix`.

    The 32 queries of a group, which write nothing, come before its 32 writes, which read nothing.

    Args:
        call: queries and writes, L of both; `state` is that before the first group.
        group_size: in tokens, 32.

    Returns:
        The reads [B, L, HO, D], and the state after the last group (empty unless it is kept).
    """
    length = call.q.shape[1]
    q = _places(call.q, group_size, 0)
    k, v, *gates = (_places(x, group_size, 1) for x in (call.k, call.v, *call.gates))
    output, state = mix(MixCall(q, k, v, tuple(gates), None, call.state, call.keep_state))
    return output.unflatten(1, (-1, 2, group_size))[:, :, 0].flatten(1, 2)[:, :length], state


def read_only(mix: Mix, q: Tensor, nothing: Tensor, gates: tuple[Tensor, ...], state: State) -> Tensor:
    """The reads [B, 1, HO, D] of one token, which writes `nothing`, a key and value of zeros."""
    still = tuple(torch.zeros_like(gate) for gate in gates)
    return mix(MixCall(q, nothing, nothing, still, None, state))[0]


def as_waiting(gate: Tensor) -> Tensor:
    """A gate rounded as it waits, to bfloat16, with its own dtype and gradients."""
    return gate + (gate.bfloat16().to(gate.dtype) - gate).detach()


def waiting(old: Tensor | None, new: Tensor, numbers: Tensor, places: int) -> Tensor:
    """The gates [B, M, ...] of the last M = `places` tokens, token n in the place n % M; bfloat16.

    Args:
        old: before the call; None before the first token.
        new: of the tokens of the call [B, T, ...]; numbers: theirs [B, T], from 0; -1 at padding.
    """
    stays = (numbers >= 0) & (numbers > numbers.amax(1, keepdim=True) - places)
    at = (numbers % places).where(stays, places)
    room = new.new_zeros(len(new), places + 1, *new.shape[2:], dtype=torch.bfloat16)
    if old is not None:
        room[:, :places] = old
    return room.scatter(1, along(at, new), new.to(room.dtype))[:, :-1].contiguous()


def waiting_of_packed(new: Tensor, cu_seqlens: Tensor, places: int) -> Tensor:
    """`waiting` of sequences that begin in one row: their gates [N, M, ...] from those of the tokens [1, T, ...]."""
    last = cu_seqlens.diff()[:, None] - 1
    number = last - (last - torch.arange(places, device=last.device)) % places
    kept = new[0, (cu_seqlens[:-1, None] + number).clamp(0, new.shape[1] - 1)]
    return kept.bfloat16().masked_fill((number < 0).view(*number.shape, *[1] * (new.dim() - 2)), 0.0)


def by_number(old: Tensor | None, new: Tensor, numbers: Tensor, first: Tensor, length: int) -> Tensor:
    """The gates [B, L, ...] of the L = `length` tokens from `first` [B, 1] on: those that wait, then those of the call.

    Other arguments are those of `waiting`.
    """
    room = new.new_zeros(len(new), length + 1, *new.shape[2:])
    if old is not None:
        at = ((torch.arange(old.shape[1], device=numbers.device) - first) % old.shape[1]).clamp_max(length)
        room = room.scatter(1, along(at, old), old.to(new.dtype))
    at = (numbers - first).where((numbers >= first) & (numbers < first + length), length)
    return room.scatter(1, along(at, new), new)[:, :-1]


def written(gate: Tensor, first: int, end: int | Tensor) -> Tensor:
    """A gate [B, T, ...] that leaves the state alone but for the tokens from `first` to `end`."""
    token = torch.arange(gate.shape[1], device=gate.device).view(-1, *[1] * (gate.dim() - 2))
    return gate.masked_fill((token < first) | (token >= end), 0.0)


def _places(x: Tensor, group_size: int, half: int) -> Tensor:
    """x [B, T, ...] in groups of 32, each with 32 zeros behind it (`half` 0) or before it: [B, 2 T', ...]."""
    groups = F.pad(x, (*[0, 0] * (x.dim() - 2), 0, -x.shape[1] % group_size)).unflatten(1, (-1, 1, group_size))
    return F.pad(groups, (*[0, 0] * (x.dim() - 1), half, 1 - half)).flatten(1, 3)
