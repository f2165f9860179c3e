"""Taking tokens back from a recurrent state, as assisted generation and prompt lookup do.

There, a model reads a block of candidate tokens, and transformers crops the cache by those that it rejects. A state
holds no history. So while a cache records its past (`Cache.activate_past_recording`), each state keeps, for its last
calls, a copy of itself before the call and a function that makes the call again for the first tokens only. `crop` goes
back to the last copy that is old enough and repeats the accepted tokens behind it. It repeats them in this layer alone,
because a layer's inputs at the accepted tokens do not depend on the tokens that follow.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from deltanet_hf.mixers.state import MixerCacheLayer

MOST_TAKEN_BACK = 64
"""Tokens that can be taken back; more only where the last call was longer."""


@dataclass(frozen=True)
class PastCall:
    """One call of a layer.

    Attributes:
        seen: tokens before it.
        state: a copy of the state before it; empty before the first token.
        repeat: makes the call again for its first tokens, given their number.
    """

    seen: int
    state: dict[str, Tensor]
    repeat: Callable[[int], object]


class History:
    """The last calls of a layer, oldest first."""

    def __init__(self) -> None:
        self.calls: list[PastCall] = []

    def add(self, call: PastCall, tokens: int) -> None:
        """Add a call of `tokens` tokens; calls that `MOST_TAKEN_BACK` tokens have followed are dropped."""
        self.calls.append(call)
        end = call.seen + tokens
        while len(self.calls) > 1 and self.calls[1].seen <= end - MOST_TAKEN_BACK:
            del self.calls[0]

    def last_before(self, seen: int) -> PastCall | None:
        """The last call that began after at most `seen` tokens; None if it is not remembered."""
        return next((call for call in reversed(self.calls) if call.seen <= seen), None)

    def clear(self) -> None:
        self.calls.clear()


def recorded(
    cache: MixerCacheLayer,
    call: Callable[[Tensor, tuple[Tensor, ...] | None, Tensor | None], Tensor],
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, ...] | None,
    padding: Tensor | None,
) -> Tensor:
    """A call of a layer, [B, T, hidden] -> [B, T, hidden], that `cache.crop` can take back.

    A long call is made in two, so that the inputs of a whole prompt are neither kept nor repeated.

    Args:
        call: calls the layer on `cache` with hidden states, position embeddings and a mask [B, T] (True at tokens) or
            None.
        position_embeddings: cos and sin, each [B, T, R] or [1, T, R]; None for a layer without them.
        padding: [B, T] bool, True at padding; None for no padding.
    """
    length = hidden_states.shape[1]
    first = max(0, length - MOST_TAKEN_BACK)

    def run(x: Tensor, start: int) -> Tensor:
        part = slice(start, start + x.shape[1])
        angles = None if position_embeddings is None else tuple(angle[:, part] for angle in position_embeddings)
        recording, cache.record_past = cache.record_past, False
        try:
            return call(x, angles, None if padding is None else ~padding[:, part])
        finally:
            cache.record_past = recording

    outputs = [run(hidden_states[:, :first], 0)] if first else []
    last = hidden_states[:, first:].clone() if first else hidden_states
    cache.remember(length - first, lambda tokens: run(last[:, :tokens], first))
    return torch.cat([*outputs, run(last, first)], dim=1)
