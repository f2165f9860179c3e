"""Bytes of the cache of a model that keeps some key/value heads or layers whole: what `convert` will make."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_hf.mixers.window import WindowSettings
from deltanet_hf.models.layers import Kind

from ..conversion_plan import cache_bytes, kept_tokens
from ..teacher_model import Teacher
from .units import Candidates, Unit, whole_heads

SINKS = WindowSettings.sinks


@dataclass(frozen=True)
class CacheSizes:
    """Bytes of one sequence of `at` tokens with keys and values in `bits` bits.

    Attributes:
        kind: what takes the place of heads and layers that are not whole.
    """

    teacher: Teacher
    candidates: Candidates
    at: int
    bits: int
    kind: Kind
    _known: dict[tuple[int | None, int, int | None, int], int] = field(default_factory=dict, repr=False, compare=False)

    @property
    def settings(self) -> dict[str, Any]:
        """The bits, and the kind unless it is a window alone: a plan depends on them, and its file has them."""
        return {"cache_bits": self.bits, **({} if self.kind.recurrent is None else {"kind": self.kind.to_dict()})}

    @property
    def teacher_bytes(self) -> int:
        """The teacher's cache in 16 bits."""
        heads = int(self.teacher.config.num_key_value_heads)
        return sum(self._layer(layer, heads, None, 16) for layer in range(self.teacher.num_layers))

    def total(self, kept: Collection[Unit], windows: Sequence[int] | None) -> int:
        """All layers, with the units `kept` whole.

        Args:
            windows: tokens that the other candidates see besides the sinks, by layer; None for those of `kind`.
        """
        whole = whole_heads(kept, self.candidates.local, int(self.teacher.config.num_key_value_heads))
        return sum(
            self._layer(layer, len(whole.get(layer, ())), None if windows is None else windows[layer], self.bits)
            for layer in range(self.teacher.num_layers)
        )

    def _layer(self, layer: int, whole: int, window: int | None, bits: int) -> int:
        """One layer with so many whole key/value heads, as the converted model has it."""
        config: Any = self.teacher.config
        family_window, heads = sliding_window(config, layer), int(config.num_key_value_heads)
        key = family_window, whole, None if whole == heads else window, bits
        if key not in self._known:
            attention: Any = self.teacher.model.model.layers[layer].self_attn  # type: ignore[union-attr, index]
            head_dim, dtype = int(attention.head_dim), self.teacher.dtype
            if whole < heads:
                kind = self.kind if window is None else self.kind.with_window(window)
                kind = kind.with_softmax_heads(heads, range(whole)) if whole else kind
                with torch.device("meta"):
                    attention = kind.mixer.from_attention(copy.deepcopy(attention), config, layer, kind.settings)
            fixed, per_token = cache_bytes(attention, head_dim, dtype, bits)
            self._known[key] = fixed + per_token * kept_tokens(self.at, family_window, packed=bits < 16)
        return self._known[key]
