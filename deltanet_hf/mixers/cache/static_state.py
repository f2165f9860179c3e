"""The state of one layer in a static cache."""

from __future__ import annotations

import torch
from torch import Tensor

from deltanet_hf.mixers.cache.state import MixerCacheLayer, State


class StaticMixerCacheLayer(MixerCacheLayer):
    """A state whose tensors, and its count as a tensor, stay at fixed addresses, as compiled decoding requires.

    It asks for masks as wide as those of the static key/value layers in the same cache. Where all of these have a
    sliding window, so that none has a place for every token, it asks for masks as they do.

    Args:
        static_length: the most tokens that one of those layers has places for.
        is_sliding: whether all of them have a sliding window.
    """

    unmovable = "StaticMixerCacheLayer"
    is_compileable = True  # for such caches transformers makes a mask per step even where nothing is masked

    def __init__(self, static_length: int, owner: str | None, is_sliding: bool) -> None:
        super().__init__(owner)
        self.static_length, self.is_sliding = static_length, is_sliding

    def _store(self, state: State) -> None:
        if not self.state:
            self.state = {name: torch.empty_like(tensor) for name, tensor in state.items()}
            device = next(iter(state.values())).device
            self.tokens_seen = torch.zeros((), dtype=torch.long, device=device)
            if not torch.compiler.is_compiling():
                for tensor in (*self.state.values(), self.tokens_seen):
                    torch._dynamo.mark_static_address(tensor)
        self._copy_in_place(state)

    def put(self, tensors: State, tokens: int) -> None:
        self.reset()
        if tensors:
            self._store(tensors)
            self.is_initialized = True
        self.tokens_seen += tokens

    def reset(self) -> None:
        count = self.tokens_seen
        super().reset()
        if isinstance(count, Tensor):
            self.tokens_seen = count.zero_()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length = self.static_length
        if not self.is_sliding:
            return length, 0
        seen = int(self.tokens_seen)
        if seen >= length:
            return length + query_length - 1, seen - length + 1
        return max(length, seen + query_length), 0
