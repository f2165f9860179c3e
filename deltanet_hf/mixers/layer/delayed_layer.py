"""A mixer whose state holds what has left its window: the call of the layer, and what it keeps between calls.

`delayed_state.py` says what a query reads, and `delayed_window.py` what leaves the window. Beside the window's cache a
layer keeps

    state, ...     the rule's state; in int8 its codes, rounded once a group, and state_scale of each row
    gate_0, ...    the gates of the tokens in the window, bfloat16: token n in the place n % 32 (N + 1)
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deltanet_hf.mixers.cache.state import State, TensorShape
from deltanet_hf.mixers.layer.angles import Angles, window_angles
from deltanet_hf.mixers.layer.delayed_state import (
    as_waiting,
    by_number,
    read_leaving,
    read_only,
    read_packed,
    read_rows,
    waiting,
)
from deltanet_hf.mixers.layer.delayed_window import Leaving, leaving
from deltanet_hf.mixers.layer.layer_call import LayerCall, MixCall, Projected
from deltanet_hf.mixers.layer.token_order import padding_last, reordered
from deltanet_kernels import round_state
from deltanet_kernels.group_rule.calls import RoundStateCall

if TYPE_CHECKING:
    from deltanet_hf.mixers.layer.mixer import Mixer

SCALE = "state_scale"


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
        state |= _waiting(call.state, gates, numbers, branch.places)
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
        memory, still = _memory(mixer, before), q.new_zeros(len(q), 1, mixer.num_states, mixer.head_dim)
        reads = read_only(mixer.mix, mixer.activated(q, still, still)[0], still, gates, memory)
        return reads, {name: before[name] for name in (*memory, SCALE) if name in before}
    parts = mixer.repeated(q.flatten(2), left.keys.flatten(2), left.values.flatten(2))
    q, k, v = mixer.activated(*map(mixer.split_heads, parts))
    inputs = MixCall(q, k, v, gates, None, None, call.keep_state, call.cu_seqlens)
    if call.cu_seqlens is not None:
        return read_packed(mixer.mix, inputs.in_one_row(), branch).view(*q.shape[:2], mixer.num_heads, -1), {}
    if left.base is None:
        reads, memory = read_rows(mixer.mix_groups, inputs, branch, call.prompt_length)
    else:
        first = (left.base * branch.edge)[:, None]
        inputs = inputs._replace(
            gates=tuple(by_number(_held(before, i), gate, numbers, first, k.shape[1]) for i, gate in enumerate(gates)),
            state=None if before is None else _memory(mixer, before),
        )
        reads, memory = read_leaving(mixer.mix_groups, inputs, numbers, left.base, branch)
    return reads, stored_memory(mixer, memory)


def _held(before: State | None, index: int) -> Tensor | None:
    """The gates that wait before the call."""
    return None if before is None else before[f"gate_{index}"]


def _waiting(before: State | None, gates: tuple[Tensor, ...], numbers: Tensor, places: int) -> State:
    """The gates that wait after the call."""
    return {f"gate_{i}": waiting(_held(before, i), gate, numbers, places) for i, gate in enumerate(gates)}


def _memory(mixer: Mixer, state: State) -> State:
    """The state of the rule, as `Mixer.mix` takes it."""
    memory = {name: state[name] for name in mixer.recurrent_shapes()}
    if SCALE in state:
        memory["state"] = state["state"] * state[SCALE].unsqueeze(-1)
    return memory


def stored_memory(mixer: Mixer, memory: State) -> State:
    """The state of the rule as the cache keeps it: the inverse of `_memory`."""
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
