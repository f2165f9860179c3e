"""The contents of a cache at one moment, kept in memory, and the way back to them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionCacheLayerMixin

from deltanet_hf.mixers.cache.mixed_cache import MixedCacheLayer
from deltanet_hf.mixers.cache.state import MixerCacheLayer


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
        self._layers = [(layer, _contents(layer)) for layer in cache.layers]

    def rewind(self) -> None:
        """Put the contents back. Layers that a first call has put into the cache since then leave it."""
        self._cache.layers[:] = [layer for layer, _ in self._layers]
        for layer, contents in self._layers:
            _put_back(layer, contents)


def _contents(layer: Any) -> dict[str, Any]:
    """Everything that a layer of a cache holds, by the names of its attributes."""
    if isinstance(layer, MixedCacheLayer):
        return {name: _contents(part) for name, part in layer.parts.items()}
    if isinstance(layer, MixerCacheLayer):
        return {"state": _copied(layer.state), "tokens_seen": int(layer.tokens_seen)}
    return {name: value if _never_changed(layer) else _copied(value) for name, value in vars(layer).items()}


def _put_back(layer: Any, contents: dict[str, Any]) -> None:
    if isinstance(layer, MixedCacheLayer):
        for name, part in layer.parts.items():
            _put_back(part, contents[name])
    elif isinstance(layer, MixerCacheLayer):
        layer.put(contents["state"], contents["tokens_seen"])
    else:
        for name in vars(layer).keys() - contents.keys():
            delattr(layer, name)
        for name, value in contents.items():
            now = getattr(layer, name, None)
            if _never_changed(layer):
                setattr(layer, name, value)
            elif isinstance(value, Tensor) and isinstance(now, Tensor):
                now.copy_(value)
            else:
                setattr(layer, name, _copied(value))


def _never_changed(layer: Any) -> bool:
    """Whether a layer's tensors are replaced by new ones and never changed in place."""
    return isinstance(layer, DynamicLayer) and not isinstance(layer, LinearAttentionCacheLayerMixin)


def _copied(value: Any) -> Any:
    """A copy of a tensor, or of the tensors in a dict; anything else as it is."""
    if isinstance(value, dict):
        return {key: _copied(inside) for key, inside in value.items()}
    return value.clone() if isinstance(value, Tensor) else value
