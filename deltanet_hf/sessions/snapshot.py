"""The contents of a cache at one moment, kept in memory, and the way back to them."""

from __future__ import annotations

from transformers.cache_utils import Cache

from deltanet_hf.mixers.cache.key_values import as_cache_layer


class Snapshot:
    """The contents of `cache` now. `rewind` brings them back, as often as wanted, as if nothing had come in between.

    States are copied: a few MB per sequence. Growing keys and values are not, because a cache makes new tensors of them
    instead of changing them; a snapshot only keeps the old ones alive. Tensors at fixed addresses (static caches) are
    copied, and rewound in their places.

    Beams and other changes of the batch may lie between a snapshot and its `rewind`.

    Args:
        cache: any cache of a converted or a softmax model that is not offloaded.

    Raises:
        ValueError: an offloaded cache, whose tensors are on their way between devices.
    """

    def __init__(self, cache: Cache) -> None:
        if cache.offloading:
            raise ValueError("snapshot: an offloaded cache moves its tensors between calls; use one that is not")
        self._cache = cache
        self._layers = [(layer, as_cache_layer(layer).snapshot()) for layer in cache.layers]

    def rewind(self) -> None:
        """Put the contents back. Layers that a first call has put into the cache since then leave it."""
        self._cache.layers[:] = [layer for layer, _ in self._layers]
        for layer, contents in self._layers:
            as_cache_layer(layer).rewind(contents)
