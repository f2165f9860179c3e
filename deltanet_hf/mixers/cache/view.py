"""The sequences of one call in a cache that a server keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from deltanet_hf.mixers.cache.state import MixerCacheLayer


@dataclass(frozen=True)
class CacheView:
    """A layer's part of a cache for one call, in the place of a cache among its arguments.

    Attributes:
        layer: has the tensors, and takes those after the call.
        state_indices: [B] int32, the rows of its tensors in which a step finds the B sequences, as for `packed_step_`;
            None for row b of sequence b.
        pages: [B, M] int32, the same of packed groups that lie in pages of their own.
        lengths: tokens of the sequences that begin in the one row of a call; each gets a row of the tensors.
    """

    layer: MixerCacheLayer
    state_indices: Tensor | None = None
    pages: Tensor | None = None
    lengths: Sequence[int] | None = None
