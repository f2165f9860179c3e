"""The tensors of a cache."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from transformers.cache_utils import Cache

from deltanet_hf.decoding.fixed_cache import parts_of
from deltanet_hf.mixers.cache.state import MixerCacheLayer


def cache_tensors(cache: Cache) -> Iterator[tuple[str, Tensor]]:
    """Of its layers in order, with names."""
    for part in parts_of(cache):
        names = part.layer.state if isinstance(part.layer, MixerCacheLayer) else ("keys", "values")
        for name in names:
            held = part.layer.state[name] if isinstance(part.layer, MixerCacheLayer) else getattr(part.layer, name)
            yield f"layer {part.at}: {name}", held
