"""Where a layer's part of transformers' `Cache` stands: the first call puts it in the place of a key/value layer.

In a static cache it is a `StaticMixerCacheLayer`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from deltanet_hf.mixers.cache.key_values import as_cache_layer
from deltanet_hf.mixers.cache.state import MixerCacheLayer, State


def cache_layer(
    cache: Cache | MixerCacheLayer, layer_idx: int, owner: str, kind: type[MixerCacheLayer]
) -> MixerCacheLayer:
    """This layer's state in `cache`; on first use it takes the place of the key/value layer made for the index.

    A branch of a layer with mixed heads is handed its part of the layer's cache instead of a cache.

    Args:
        owner: the name of the kind of layer.
        kind: its class, outside of static caches.

    Raises:
        ValueError: the layer in the cache holds tokens that a layer of another kind has seen.
    """
    if isinstance(cache, MixerCacheLayer):
        return cache
    layer = layer_at(cache, layer_idx)
    if getattr(layer, "owner", None) != owner:
        refuse_filled(layer, layer_idx, owner)
        layer = cache.layers[layer_idx] = new_layer(cache, kind, owner)
    return layer  # type: ignore[no-any-return]


def layer_at(cache: Cache, layer_idx: int) -> Any:
    """The cache's layer of this index, made by the cache's own rule if there is none yet."""
    while len(cache.layers) <= layer_idx:
        cache.layers.append((cache.layer_class_to_replicate or DynamicLayer)())
    return cache.layers[layer_idx]


def refuse_filled(layer: Any, layer_idx: int, owner: str) -> None:
    """Raises ValueError if a layer of a cache, which `owner` did not fill, holds tokens."""
    tokens = as_cache_layer(layer).tokens
    # transformers' own states of linear attention do not count
    held = any(layer.has_previous_state.values()) if tokens is None else int(tokens) > 0
    if held:
        raise ValueError(
            f"cache: layer {layer_idx} holds what a layer of another kind kept, which a {owner} layer cannot "
            "continue (PEFT's prefix tuning, or the cache of another model); train LoRA adapters instead, or pass an "
            "empty cache"
        )


def new_layer(cache: Cache, kind: type[MixerCacheLayer], owner: str | None = None) -> MixerCacheLayer:
    """An empty layer for `cache`, of this class where it is not static.

    The length of a static cache is the longest of its layers: those with sliding windows are shorter than the sequence.

    Raises:
        ValueError: a class that grows, in a static cache.
    """
    others = cache.layers
    lengths = [getattr(other, "max_cache_len", 0) for other in others]
    lengths += [getattr(other, "static_length", 0) for other in others]
    if not any(lengths):
        return kind(owner)
    if kind.grows:
        raise ValueError(
            f"cache: a static cache has no room for what grows with the tokens ({kind.__name__}), and holds keys and "
            "values in 16 bits only; use a cache that grows, such as DynamicCache()"
        )
    return StaticMixerCacheLayer(max(lengths), owner, all(getattr(other, "is_sliding", False) for other in others))


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
