"""The state of what has left the window: the tokens that queries no longer see, and no others.

Tokens of a sequence are numbered from 0 and lie in groups of 32, as a packed cache holds them. A query of group c sees
its own group up to itself, the N groups before, and the sinks. It reads a state that holds the tokens of all groups
before these, without the sinks:

    o_t = D^-0.5 q_t^T S_{t // 32 - N}        S_i = 0 for i <= 0;  S_{i+1} is S_i after the writes of group i

So a token is seen exactly or remembered, never both. The state changes once in 32 tokens; between two changes a
decoding step only reads it.

A rule computes this with the operator that it has: the 32 queries of a group, which write nothing, come before the 32
tokens that leave the window at its end, which read nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from deltanet_hf.mixers.cache.state import State
from deltanet_hf.mixers.layer.mix_call import MixCall
from deltanet_kernels.packed_cache.layout import GROUP

Mix = Callable[[MixCall], tuple[Tensor, State]]


def read_delayed(mix: Mix, call: MixCall, groups: int, sinks: int) -> Tensor:
    """The reads [B, T, HO, D] of whole sequences without padding, one a row; 0 where nothing has left the window.

    Args:
        mix: `Mixer.mix`.
        call: keys, values and gates of the tokens, and the queries, all by the tokens' own places.
        groups: N.
        sinks: first tokens, which are never written.
    """
    hidden = groups * GROUP
    length = call.q.shape[1] - hidden
    if length <= 0:
        return call.q.new_zeros(*call.q.shape[:3], call.v.shape[3])
    gates = tuple(without_first(gate[:, :length], sinks) for gate in call.gates)
    output = read_groups(mix, MixCall(call.q[:, hidden:], call.k[:, :length], call.v[:, :length], gates))[0]
    return F.pad(output, (0, 0, 0, 0, hidden, 0))


def read_groups(mix: Mix, call: MixCall) -> tuple[Tensor, State]:
    """Queries of group i read the state before the writes of group i; the rest is as in `Mixer.mix`.

    Args:
        call: queries and writes, T of both; `state` is that before the first group.

    Returns:
        The reads [B, T, HO, D], and the state after the last group (empty unless it is kept).
    """
    length = call.q.shape[1]
    q = _places(call.q, 0)
    k, v, *gates = (_places(x, 1) for x in (call.k, call.v, *call.gates))
    output, state = mix(MixCall(q, k, v, tuple(gates), None, call.state, call.keep_state))
    return output.unflatten(1, (-1, 2, GROUP))[:, :, 0].flatten(1, 2)[:, :length], state


def _places(x: Tensor, half: int) -> Tensor:
    """x [B, T, ...] in groups of 32, each with 32 zeros behind it (`half` 0) or before it: [B, 2 T', ...]."""
    groups = F.pad(x, (*[0, 0] * (x.dim() - 2), 0, -x.shape[1] % GROUP)).unflatten(1, (-1, 1, GROUP))
    return F.pad(groups, (*[0, 0] * (x.dim() - 1), half, 1 - half)).flatten(1, 3)


def without_first(gate: Tensor, count: int) -> Tensor:
    """A gate [B, T, ...] that leaves the state alone at the first tokens."""
    token = torch.arange(gate.shape[1], device=gate.device).view(-1, *[1] * (gate.dim() - 2))
    return gate.masked_fill(token < count, 0.0)
