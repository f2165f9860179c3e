"""Bytes of the cache of a model that keeps some key/value heads or layers whole: what `convert` will make."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deltanet_hf.mixers.cache.packed_reach import held_bytes
from deltanet_hf.mixers.cache.window_cache import window_shapes
from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_hf.mixers.window import WindowSettings

from ..conversion_plan import LayerPlan
from ..teacher_model import Teacher
from .units import Candidates, Unit, whole_heads

SINKS = WindowSettings.sinks


@dataclass(frozen=True)
class CacheSizes:
    """Bytes of one sequence of `at` tokens with keys and values in `bits` bits.

    Attributes:
        layers: the plan of a conversion of every layer; not needed where windows are planned.
    """

    teacher: Teacher
    candidates: Candidates
    at: int
    bits: int
    layers: tuple[LayerPlan, ...] = ()

    @property
    def teacher_bytes(self) -> int:
        """The teacher's cache in 16 bits."""
        return replace(self, bits=16).total(self.candidates.units, None)

    def total(self, kept: Collection[Unit], windows: Sequence[int] | None) -> int:
        """All layers, with the units `kept` whole.

        Args:
            windows: tokens that the other candidates see besides the sinks, by layer; None where they are converted
                as `layers` says.
        """
        heads = int(self.teacher.config.num_key_value_heads)
        whole = whole_heads(kept, self.candidates.local, heads)
        found = 0.0
        for layer in range(self.teacher.num_layers):
            count = len(whole.get(layer, ()))
            found += self._heads(layer, count)
            if windows is not None:
                found += self._heads(layer, heads - count, windows[layer])
            elif count < heads:
                found += self.layers[layer].cache_bytes(self.at) * (heads - count) / heads
        return round(found)

    def _heads(self, layer: int, count: int, window: int | None = None) -> int:
        """`count` key/value heads of one layer: with a window and its sinks, or whole for None."""
        if count == 0:
            return 0
        attention: Any = self.teacher.model.model.layers[layer].self_attn  # type: ignore[union-attr, index]
        size, dtype = int(attention.head_dim), self.teacher.dtype
        if self.bits == 16 and window is not None:  # a ring of its full length, with the numbers of its tokens
            return sum(shape.nbytes for shape in window_shapes(count, size, window + SINKS, dtype).values())
        family_window = sliding_window(self.teacher.config, layer)
        return held_bytes(count, size, self.at, self.bits, dtype, window, SINKS, family_window)
