"""The layer of a cache that holds packed keys and values of all tokens; see `quantised_kv_cache.py`."""

from __future__ import annotations

from deltanet_hf.mixers.cache.protocol import TensorShape
from deltanet_hf.mixers.cache.quantised_cache_spec import PACKED, groups_before
from deltanet_hf.mixers.cache.state import MixerCacheLayer


class PackedCacheLayer(MixerCacheLayer):
    """A state to which every group of tokens adds its packed form."""

    grows = True

    def shapes(self, tokens: int) -> dict[str, TensorShape]:
        shapes = super().shapes(tokens)
        for name in PACKED:
            heads, _, *group = shapes[name].shape
            shapes[name] = TensorShape((heads, groups_before(tokens), *group), shapes[name].dtype)
        return shapes
