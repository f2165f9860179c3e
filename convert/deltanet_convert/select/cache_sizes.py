"""Bytes of the cache of a model whose key/value heads keep all tokens or have a window: what `convert` will make."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from deltanet_hf.mixers.cache.window_cache import window_shapes
from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_hf.mixers.window import WindowSettings
from deltanet_hf.models.cache_bits import held_bytes

from ..teacher_model import Teacher
from .units import Candidates, Unit, whole_heads

SINKS = WindowSettings.sinks


@dataclass(frozen=True)
class CacheSizes:
    """Bytes of one sequence of `at` tokens with keys and values in `bits` bits."""

    teacher: Teacher
    candidates: Candidates
    at: int
    bits: int

    @property
    def teacher_bytes(self) -> int:
        """The teacher's cache in 16 bits."""
        return replace(self, bits=16).whole(range(self.teacher.num_layers))

    def total(self, kept: Collection[Unit], window: int) -> int:
        """All layers, with the units `kept` whole and a window in the other candidates."""
        heads = int(self.teacher.config.num_key_value_heads)
        whole = whole_heads(kept, self.candidates.local, heads)
        counts = [len(whole.get(layer, ())) for layer in range(self.teacher.num_layers)]
        return sum(
            self.heads(layer, count) + self.heads(layer, heads - count, window) for layer, count in enumerate(counts)
        )

    def whole(self, layers: Iterable[int]) -> int:
        """These layers, all of whose heads keep all tokens."""
        return sum(self.heads(layer, int(self.teacher.config.num_key_value_heads)) for layer in layers)

    def heads(self, layer: int, count: int, window: int | None = None) -> int:
        """`count` key/value heads of one layer: with a window and its sinks, or whole for None."""
        attention: Any = self.teacher.model.model.layers[layer].self_attn  # type: ignore[union-attr, index]
        size, dtype = int(attention.head_dim), self.teacher.dtype
        family_window = sliding_window(self.teacher.config, layer)
        if count == 0:
            return 0
        if self.bits == 16 and window is not None:  # a ring of its full length, with the numbers of its tokens
            return sum(shape.nbytes for shape in window_shapes(count, size, window + SINKS, dtype).values())
        return held_bytes(count, size, self.at, self.bits, dtype, window, SINKS, family_window)
