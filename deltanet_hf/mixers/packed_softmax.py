"""A family's softmax attention over keys and values in 8 or 4 bits, with a packed cache that grows.

The layer is the family's own attention module, as in `window.py`; only its cache and its softmax differ. It stays a
softmax layer of the model: `set_cache_bits` puts it there and takes it away again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from deltanet_hf.mixers.layer_kind import PositionEmbeddings
from deltanet_hf.mixers.masks import packed_in, padding_in, sliding_window
from deltanet_hf.mixers.packed_tokens import Kept, PackedTokens
from deltanet_hf.mixers.paired_class import paired_class
from deltanet_hf.mixers.recorded_call import recorded
from deltanet_hf.mixers.routed_config import RoutedConfig
from deltanet_hf.mixers.state import MixerCacheLayer, cache_layer, may_change
from deltanet_hf.mixers.window_cache import Tokens
from deltanet_hf.mixers.window_softmax import IMPLEMENTATION, Reach, WindowCall


class PackedSoftmax:
    """Stands before the family's class (`paired_class`), so that `super().forward` is the family's attention."""

    name = "packed softmax"
    cache_bits: int
    layer_idx: int
    config: Any

    def place_cache(self, cache: Cache) -> None:
        """As in `LayerKind`."""
        cache_layer(cache, self.layer_idx, self.name)

    @property
    def kept(self) -> Kept:
        """The part of a sequence that the layer keeps."""
        return Kept.of(self.cache_bits, None, 0, sliding_window(self.config.whole, self.layer_idx))

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: PositionEmbeddings | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        cu_seq_lens_q: Tensor | None = None,
        padding: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention's signature. hidden_states [B, T, hidden] -> ([B, T, hidden], None).

        Raises:
            ValueError: a mask that cannot be read, packed sequences, or a static cache.
        """
        length = hidden_states.shape[1]
        cache = None if past_key_values is None else cache_layer(past_key_values, self.layer_idx, self.name)
        padding = padding_in(attention_mask, padding, length, 0 if cache is None else cache.get_seq_length())
        packed = packed_in(cu_seq_lens_q, length, cache)
        if cache is not None and cache.record_past:
            again = functools.partial(self.call_on, cache)
            return recorded(cache, again, hidden_states, position_embeddings, padding), None
        inputs = {"hidden_states": hidden_states, "position_embeddings": position_embeddings, **kwargs}
        return call_packed(super().forward, self.kept, cache, padding, packed, inputs)  # type: ignore[misc]

    def call_on(
        self, cache: MixerCacheLayer, x: Tensor, position_embeddings: PositionEmbeddings | None, mask: Tensor | None
    ) -> Tensor:
        """As in `Mixer`."""
        output: Tensor = self(  # type: ignore[operator]
            hidden_states=x, position_embeddings=position_embeddings, attention_mask=mask, past_key_values=cache
        )[0]
        return output


def call_packed(
    family: Callable[..., Any],
    kept: Kept,
    cache: MixerCacheLayer | None,
    padding: Tensor | None,
    cu_seqlens: Tensor | None,
    inputs: dict[str, Any],
) -> tuple[Tensor, None]:
    """A call of a family's attention on packed keys and values: ([B, T, hidden], None).

    Args:
        family: the forward of the family's attention.
        cache: the layer's part of a cache, which takes the new tokens.
        padding: [B, T] bool, True at padding; None for none.
        cu_seqlens: boundaries of packed sequences, which are refused.
        inputs: other keyword arguments of `family`.

    Raises:
        ValueError: packed sequences, or a static cache.
    """
    if cu_seqlens is not None:
        raise ValueError("cache bits: packed sequences are read in 16 bits; pad them instead")
    if cache is not None and cache.static_length is not None:
        raise ValueError("cache bits: a static cache holds 16 bits; use a cache that grows, such as DynamicCache()")
    x: Tensor = inputs["hidden_states"]
    length = x.shape[1]
    state = cache.state if cache is not None and cache.is_initialized else {}
    in_place = cache is not None and length == 1 and may_change(cache)
    seen = 0 if cache is None else int(cache.get_seq_length())
    held = PackedTokens(kept, state, padding, seen, cache is not None, in_place)
    tokens = Tokens.of(x.shape[0], length, None, None, None, x.device)
    call = WindowCall(tokens, tokens, Reach(0, 0, None), None, in_order=False, eager=False, weights=False, packed=held)
    output, _ = family(attention_mask=None, past_key_values=None if cache is None else held, call=call, **inputs)
    if cache is not None:
        cache.grows = kept.window is None
    if cache is not None and held.state is cache.state:
        cache.count(1)
    elif cache is not None:
        cache.advance(length, held.state)
    return output, None


def pack_softmax(attention: Any, bits: int) -> None:
    """Let a family's attention keep its keys and values in `bits` bits; 16 makes it the family's own again."""
    if isinstance(attention, PackedSoftmax):
        attention.__class__ = type(attention).__bases__[1]
        attention.config = attention.config.whole
    attention.cache_bits = bits
    if bits < 16:
        family: type[nn.Module] = type(attention)
        attention.__class__ = paired_class(PackedSoftmax, family, f"Packed{family.__name__}")
        attention.config = RoutedConfig(attention.config, IMPLEMENTATION)
