"""A call of a layer whose last tokens `MixerCacheLayer.crop` can take back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deltanet_hf.mixers import history
from deltanet_hf.mixers.state import MixerCacheLayer


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
    first = max(0, length - history.MOST_TAKEN_BACK)

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
