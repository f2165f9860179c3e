"""A family's own softmax attention under the contract of `LayerKind`: what goes over layers asks all of them alike."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from deltanet_hf.mixers.attention.packed_softmax import pack_softmax
from deltanet_hf.mixers.cache.protocol import TensorShape
from deltanet_hf.mixers.layer.layer_kind import LayerKind, own_kind, softmax_bytes


class FamilyAttention(LayerKind):
    """Stands for the attention, and is no module of the model."""

    name: ClassVar[str] = "softmax"
    title: ClassVar[str] = "softmax"
    keeps_all_tokens: ClassVar[bool] = True
    reads_further: ClassVar[bool] = True

    def __init__(self, attention: Any) -> None:
        self.attention = attention

    @property
    def branches(self) -> dict[str, Any]:
        return {"": self.attention}

    @property
    def softmax_parts(self) -> list[tuple[Any, int]]:
        return [(self.attention, self.growing_heads)]

    def use_cache_bits(self, bits: int) -> None:
        pack_softmax(self.attention, bits)

    @property
    def growing_heads(self) -> int:
        return int(self.attention.config.num_key_value_heads)

    def new_parts(self) -> list[nn.Module]:
        return []

    def state_shapes(self, dtype: torch.dtype) -> dict[str, TensorShape]:
        return {}

    def stored_bytes(self, dtype: torch.dtype, tokens: int, bits: int) -> int:
        return softmax_bytes(self.attention, dtype, tokens, bits)


def kind_of(attention: Any) -> LayerKind:
    """A layer's attention, or a branch of it, as what can be asked."""
    return own_kind(attention) or FamilyAttention(attention)
