"""The argument of `Mixer.mix`: what a rule reads of one call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deltanet_hf.mixers.cache.state import State


class MixCall(NamedTuple):
    """The tokens of a call as the recurrence reads them, and the state before them.

    Shapes: B batch, T tokens, D head size; HQ, HK, HV heads of q, k and v.
    """

    q: Tensor  # [B, T, HQ, D], after convolution, rotation and activation
    k: Tensor  # [B, T, HK, D]
    v: Tensor  # [B, T, HV, D]
    gates: tuple[Tensor, ...]  # what `Mixer.gates` returned, each [B, T, ...]
    padding: Tensor | None = None  # [B, T] bool, True at padding, where the gates leave the state alone already
    state: State | None = None  # after the tokens before, by the names of `recurrent_shapes`; None for zeros
    keep_state: bool = False  # whether the state after the last token is wanted
    cu_seqlens: Tensor | None = None  # [N + 1] boundaries of sequences packed into one row (B = 1)

    @property
    def decodes(self) -> bool:
        """Whether this is one decoding step, for which the recurrence is the faster form."""
        return self.q.shape[1] == 1 and not torch.is_grad_enabled()

    def in_one_row(self) -> MixCall:
        """The rows of packed sequences one after the other, B = 1, as `cu_seqlens` counts their tokens."""

        def joined(x: Tensor) -> Tensor:
            return x.flatten(0, 1).unsqueeze(0)

        padding = None if self.padding is None else joined(self.padding)
        gates = tuple(map(joined, self.gates))
        q, k, v = joined(self.q), joined(self.k), joined(self.v)
        # By name, because torch.compile (2.11) cannot make again what `_replace` made.
        return MixCall(q, k, v, gates, padding, self.state, self.keep_state, self.cu_seqlens)
