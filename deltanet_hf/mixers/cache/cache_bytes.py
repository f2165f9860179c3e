"""The bytes of a cache."""

from __future__ import annotations

from transformers.cache_utils import Cache

from deltanet_hf.mixers.cache.key_values import as_cache_layer


def cache_bytes(cache: Cache) -> int:
    """Bytes that a cache holds: the states of converted layers, the keys and values of the others."""
    return sum(as_cache_layer(layer).nbytes for layer in cache.layers)
