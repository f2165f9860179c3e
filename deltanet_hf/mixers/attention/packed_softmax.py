"""A family's softmax attention over keys and values in 8 or 4 bits, with a packed cache that grows.

The layer is the family's own attention module, as in `window.py`; only its cache and its softmax differ. It stays a
softmax layer of the model: `set_cache_bits` puts it there and takes it away again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.attention.cut_distances import CutSoftmax
from deltanet_hf.mixers.attention.paired_class import behind, paired_class
from deltanet_hf.mixers.attention.routed_config import BY_CALL, RoutedConfig
from deltanet_hf.mixers.cache.argument import CACHE, given_cache
from deltanet_hf.mixers.cache.cache_layer import cache_layer
from deltanet_hf.mixers.cache.quantised_cache_spec import PACKED_ROWS, QuantisedCacheSpec
from deltanet_hf.mixers.cache.quantised_kv_cache import PackedCacheLayer, QuantisedKVCache
from deltanet_hf.mixers.cache.sinks_apart import with_learned_sinks
from deltanet_hf.mixers.cache.state import MixerCacheLayer, TensorShape
from deltanet_hf.mixers.layer.layer_call import LayerCall, recorded
from deltanet_hf.mixers.layer.layer_kind import LayerKind, PositionEmbeddings, softmax_bytes
from deltanet_hf.mixers.layer.masks import sliding_window


class PackedSoftmax(LayerKind):
    """Stands before the family's class (`paired_class`), so that `super().forward` is the family's attention."""

    name: ClassVar[str] = "softmax"
    title: ClassVar[str] = "softmax"
    new_weights: ClassVar[bool] = False
    keeps_all_tokens: ClassVar[bool] = True
    reads_further: ClassVar[bool] = True
    has_step = True  # as in `WindowAttention`
    cache_bits: int
    layer_idx: int
    head_dim: int
    config: Any
    config_in_16: Any  # the configuration of the same attention with keys and values in 16 bits

    def use_cache_bits(self, bits: int) -> None:
        pack_softmax(self, bits)

    def place_cache(self, cache: Cache) -> MixerCacheLayer:
        return cache_layer(cache, self.layer_idx, self.name, self.cache_class)

    @property
    def cache_class(self) -> type[MixerCacheLayer]:  # type: ignore[override]
        """A family's own sliding window bounds what is kept."""
        grows = sliding_window(self.config.whole, self.layer_idx) is None
        return PackedCacheLayer if grows else MixerCacheLayer

    @property
    def cache_spec(self) -> QuantisedCacheSpec:
        """The part of a sequence that the layer keeps."""
        family_window = sliding_window(self.config.whole, self.layer_idx)
        return QuantisedCacheSpec.of(self.cache_bits, None, 0, family_window, getattr(self, "key_order", None))

    def state_shapes(self, dtype: torch.dtype) -> dict[str, TensorShape]:
        """Of one token: the groups that others add are not in it."""
        return self.cache_spec.shapes(self.config.num_key_value_heads, self.head_dim, 1)

    def stored_bytes(self, dtype: torch.dtype, tokens: int, bits: int) -> int:
        return softmax_bytes(self, dtype, tokens, bits)

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
            ValueError: a mask that cannot be read, or as `call_packed`.
        """
        length = hidden_states.shape[1]
        call = LayerCall.of(self, length, attention_mask, given_cache(past_key_values, kwargs), cu_seq_lens_q, padding)
        if call.is_recorded:
            return recorded(self, call, hidden_states, position_embeddings), None
        inputs = {"hidden_states": hidden_states, "position_embeddings": position_embeddings, **kwargs}
        return call_packed(super().forward, self.cache_spec, call, inputs)  # type: ignore[misc]


@dataclass  # not frozen: torch.compile in torch 2.11 cannot call an instance of a frozen data class
class PackedCall:
    """One call of a layer on packed keys and values, without q, k and v."""

    held: QuantisedKVCache

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        query_scale: Tensor | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """As of `SoftmaxCall`; queries are multiplied by `query_scale` [B or 1, T], if there is one."""
        q, k, v = (states.transpose(1, 2).to(value.dtype) for states in (query, key, value))
        if query_scale is not None:
            q = (q * query_scale[:, :, None, None]).to(q.dtype)
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        output, _ = with_learned_sinks(*self.held.attend(q, k, v, scale, softcap), s_aux)
        return output.to(query.dtype).contiguous(), None


def call_packed(
    family: Callable[..., Any],
    spec: QuantisedCacheSpec,
    call: LayerCall,
    inputs: dict[str, Any],
    turn: PositionEmbeddings | None = None,
) -> tuple[Tensor, None]:
    """A call of a family's attention on packed keys and values: ([B, T, hidden], None).

    Args:
        family: the forward of the family's attention.
        call: its cache takes the new tokens.
        inputs: other keyword arguments of `family`.
        turn: cos and sin by which queries turn before they meet sinks, or None (`sinks_apart.py`).

    Raises:
        ValueError: packed sequences without a cache that knows their lengths, or a static cache.
    """
    cache = call.cache
    if call.cu_seqlens is not None and call.lengths is None:
        raise ValueError(PACKED_ROWS)
    if cache is not None and cache.static_length:
        raise ValueError("cache bits: a static cache holds 16 bits; use a cache that grows, such as DynamicCache()")
    length = inputs["hidden_states"].shape[1]
    in_place = cache is not None and length == 1 and cache.may_change
    seen = 0 if cache is None else int(cache.get_seq_length())
    held = QuantisedKVCache(
        spec,
        call.state or {},
        call.padding,
        seen,
        keep_state=call.keep_state,
        in_place=in_place,
        lengths=call.lengths,
        cu_seqlens=call.cu_seqlens,
        state_indices=call.state_indices,
        pages=call.pages,
        turn=turn,
    )
    output, _ = family(attention_mask=None, call=PackedCall(held), **{CACHE: None if cache is None else held}, **inputs)
    if cache is not None:
        cache.advance(length, held.state)
    return output, None


def pack_softmax(attention: Any, bits: int) -> None:
    """Let a family's attention keep its keys and values in `bits` bits; 16 makes it the family's own again."""
    family = behind(PackedSoftmax, type(attention))
    if family is not type(attention):
        attention.__class__, attention.config = family, attention.config_in_16
    attention.cache_bits = bits
    if bits < 16:
        if isinstance(attention, CutSoftmax):
            raise UserError(
                f"cache bits: got {bits}, and cut distances need keys in 16; take 16 bits, or positions of another kind"
            )
        attention.__class__ = paired_class(PackedSoftmax, family, f"Packed{family.__name__}")
        attention.config_in_16 = attention.config
        attention.config = RoutedConfig(attention.config, BY_CALL)
