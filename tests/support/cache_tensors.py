"""The tensors of a cache."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from transformers.cache_utils import Cache

from deltanet_hf.mixers.cache.key_values import as_cache_layer


def cache_tensors(cache: Cache) -> Iterator[tuple[str, Tensor]]:
    """Of its layers in order, with names."""
    for index, layer in enumerate(cache.layers):
        for name, held in as_cache_layer(layer).tensors().items():
            yield f"layer {index}: {name}", held
