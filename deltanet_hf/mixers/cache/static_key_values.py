"""Keys and values of softmax layers in a fixed number of places, as a captured step needs them.

Token number n of a row, counted from 0 with padding, stands in the place n modulo the number of places. Layers that see
all tokens have more places than there are tokens; those with a sliding window have as many as the window sees, and the
newest token takes the place of the one that leaves it. A mask over the places says which of them hold real tokens. One
query sees all of these, so neither their order nor their number matters.

Shapes: B batch, H key/value heads, S places, D channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from deltanet_hf.mixers.cache.protocol import CacheLayer, State


class Places:
    """The places of all layers with the same window.

    Args:
        window: tokens that a query sees; None for all.
        capacity: tokens that the layers are to hold at least, where they see as many.
        dtype: of the mask: bool (True: seen), or floating with 0 where seen and the lowest number elsewhere.
    """

    def __init__(self, batch: int, window: int | None, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.window, self.size = window, capacity if window is None else min(window, capacity)
        values = (True, False) if dtype == torch.bool else (0.0, torch.finfo(dtype).min)
        self._seen: float = values[0]
        self._hidden: float = values[1]
        self.mask = torch.full((batch, 1, 1, self.size), self._hidden, dtype=dtype, device=device)
        self.now = torch.zeros(1, dtype=torch.long, device=device)

    def load(self, seen: int, real: Tensor | None) -> None:
        """Mask the places as after `seen` tokens; real [B, seen] bool is False at padding."""
        self.mask.fill_(self._hidden)
        first = max(0, seen - self.size)
        if real is None:
            self.mask[..., self.of(first, seen)] = self._seen
        else:
            shown = torch.full_like(self.mask[:, 0, 0, : seen - first], self._hidden)
            shown.masked_fill_(real[:, first:], self._seen)
            self.mask[:, 0, 0, self.of(first, seen)] = shown

    def of(self, first: int, end: int) -> Tensor:
        """The places of the tokens from number `first` to before `end`."""
        return torch.arange(first, end, device=self.now.device) % self.size

    def enter(self, number: Tensor) -> None:
        """Give the token with this number, [1] int64 on the device, its place, and show it."""
        torch.remainder(number, self.size, out=self.now)
        self.mask.index_fill_(3, self.now, self._seen)


class StaticKeyValues(CacheLayer, CacheLayerMixin):
    """Stands in a cache for a growing or sliding key/value layer: `keys` [B, H, S, D] and `values` at fixed addresses.

    It gets its memory with the first tokens, so that a cache that moves in needs that of one layer twice, not of all.

    Args:
        places: of the layers with its window.
    """

    supports_early_init = False
    in_order = False

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places, self._seen = places, 0
        self.is_sliding = places.window is not None
        self.is_initialized = True
        self._layer: Any = None

    def load(self, layer: Any, seen: int) -> None:
        """Take over the tokens of `layer`, which has seen `seen` and is empty until `release`."""
        self._layer, self._seen = layer, seen
        held = min(layer.keys.shape[2], self.places.size)
        places = self.places.of(seen - held, seen)
        if self.keys is None:
            self.keys, self.values = (self._room_for(x) for x in (layer.keys, layer.values))
        assert self.values is not None
        for mine, theirs in ((self.keys, layer.keys), (self.values, layer.values)):
            mine.zero_()  # `decay_bias.py` reads all places
            mine.index_copy_(2, places, theirs[:, :, theirs.shape[2] - held :])
        layer.keys = layer.values = None

    @torch.inference_mode(False)  # such tensors may be changed in both modes
    def _room_for(self, x: Tensor) -> Tensor:
        return torch.empty(*x.shape[:2], self.places.size, x.shape[-1], dtype=x.dtype, device=x.device)

    @property
    def batch_size(self) -> int:
        return -1 if self.keys is None else len(self.keys)

    def tensors(self, window: int | None = None) -> State:
        return {} if self.keys is None or self.values is None else {"keys": self.keys, "values": self.values}

    def changed(self, number: int) -> tuple[Tensor, Tensor]:
        """Key and value [B, H, D] in the place of the token with this number, not copied."""
        place = number % self.places.size
        assert self.keys is not None
        assert self.values is not None
        return self.keys[:, :, place], self.values[:, :, place]

    def release(self, tokens: int, copied: bool) -> Any:
        """Give the tokens back; returns the layer of `load`, which may share memory with this one even if `copied`."""
        layer, window = self._layer, self.places.window
        held = tokens if window is None else min(tokens, window - 1)  # as transformers' sliding layers
        assert self.keys is not None
        assert self.values is not None
        if tokens <= self.places.size:
            layer.keys, layer.values = (x[:, :, tokens - held : tokens] for x in (self.keys, self.values))
        else:
            places = self.places.of(tokens - held, tokens)
            layer.keys, layer.values = (x.index_select(2, places) for x in (self.keys, self.values))
        if window is not None:
            layer.cumulative_length = tokens
        self._layer = None
        return layer

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes the key and value [B, H, 1, D] of the token that `Places.enter` placed; returns all places."""
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, self.places.now, key_states)
        self.values.index_copy_(2, self.places.now, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self._seen  # at `load`: the count goes on in `StaticCacheBuffers`

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.places.size, 0

    def get_max_length(self) -> int:
        return self.places.size

    get_max_cache_shape = get_max_length

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("lazy_initialization: the places are made from a layer that holds tokens")
