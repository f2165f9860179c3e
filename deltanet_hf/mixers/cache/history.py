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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MOST_TAKEN_BACK = 64
"""Tokens that can be taken back; more only where the last call was longer."""


@dataclass(frozen=True)
class PastCall:
    """One call of a layer.

    Attributes:
        seen: tokens before it.
        state: a copy of the state before it; empty before the first token.
        repeat: makes the call again for its first tokens, given the layer of the cache (the one that was called, or a
            copy of it) and their number.
        gradients, inference: the modes of the call, in which it is repeated too, wherever `crop` is called.
    """

    seen: int
    state: dict[str, Tensor]
    repeat: Callable[[Any, int], object]
    gradients: bool = field(default_factory=torch.is_grad_enabled)
    inference: bool = field(default_factory=torch.is_inference_mode_enabled)


class History:
    """The last calls of a layer, oldest first.

    Attributes:
        end: tokens after the last of them; a state of more tokens has read some that were not recorded.
    """

    def __init__(self) -> None:
        self.calls: list[PastCall] = []
        self.end = 0

    def add(self, call: PastCall, tokens: int) -> None:
        """Add a call of `tokens` tokens; calls that `MOST_TAKEN_BACK` tokens have followed are dropped."""
        self.calls.append(call)
        self.end = call.seen + tokens
        while len(self.calls) > 1 and self.calls[1].seen <= self.end - MOST_TAKEN_BACK:
            del self.calls[0]

    def last_before(self, seen: int) -> PastCall | None:
        """The last call that began after at most `seen` tokens; None if it is not remembered."""
        return next((call for call in reversed(self.calls) if call.seen <= seen), None)

    def clear(self) -> None:
        self.calls.clear()
