"""The bytes of a cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from deltanet_hf.mixers.cache.state import MixerCacheLayer

QUANTISED = ("_quantized_keys", "_quantized_values")  # where transformers' quantised layers keep them


def cache_bytes(cache: Cache) -> int:
    """Bytes that a cache holds: the states of converted layers, the keys and values of the others."""
    return sum(_held_bytes(layer) for layer in cache.layers)


def _held_bytes(layer: Any) -> int:
    parts: dict[str, Any] | None = getattr(layer, "parts", None)
    if parts is not None:
        return sum(_held_bytes(part) for part in parts.values())
    if isinstance(layer, MixerCacheLayer):
        return _nbytes(layer.state)
    return sum(_nbytes(getattr(layer, name, None)) for name in ("keys", "values", *QUANTISED))


def _nbytes(held: Any) -> int:
    """Bytes of a tensor, or of all tensors inside a container or a quantised tensor."""
    if isinstance(held, Tensor):
        if not hasattr(held, "__tensor_flatten__"):
            return held.numel() * held.element_size()
        return sum(_nbytes(getattr(held, name)) for name in held.__tensor_flatten__()[0])
    inside = held.values() if isinstance(held, dict) else held if isinstance(held, (tuple, list)) else ()
    return sum(_nbytes(part) for part in inside)
