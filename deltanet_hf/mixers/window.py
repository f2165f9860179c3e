"""Softmax attention over a sliding window and attention sinks, with a cache of constant size.

Every query sees the last `window` tokens (itself included) and the first `sinks` tokens of its own sequence (Xiao et
al., Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453). Positions stay those of the
unrestricted model. Distances are counted in tokens that are not padding.

The layer is the family's own attention module, with its weights and their names: only the mask and the cache differ,
so everything a family does in its attention (learned norms, capped scores, a sliding window of its own) stays as it
is. Long texts are read without a mask over all pairs of tokens (`attention/window_softmax.py`). It is a kind of layer
for `deltanet-hf convert --mixer window`, and the baseline that needs no training (`models/restrict.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from deltanet_hf.mixers.attention.packed_softmax import call_packed
from deltanet_hf.mixers.attention.paired_class import behind, paired_class, require_own_forward
from deltanet_hf.mixers.attention.routed_config import BY_CALL, RoutedConfig
from deltanet_hf.mixers.attention.single_query import TAKES_MASK
from deltanet_hf.mixers.attention.window_softmax import Reach, SoftmaxCall
from deltanet_hf.mixers.cache.argument import CACHE, given_cache
from deltanet_hf.mixers.cache.cache_layer import cache_layer
from deltanet_hf.mixers.cache.quantised_cache_spec import QuantisedCacheSpec, held_bytes
from deltanet_hf.mixers.cache.state import MixerCacheLayer, TensorShape
from deltanet_hf.mixers.cache.window_cache import SinkCache, Tokens, window_shapes
from deltanet_hf.mixers.layer.layer_call import Angles, LayerCall, recorded, window_angles
from deltanet_hf.mixers.layer.layer_kind import LayerKind
from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_hf.mixers.layer.settings import MixerSettings, check_at_least

# Tokens: a ninth of the memory at 2,048 tokens in 4 bits with a tenth of the heads whole (docs/results.md).
RECOMMENDED = 481


@dataclass(frozen=True)
class WindowSettings(MixerSettings):
    """Settings of the window."""

    window: int = 64  # the most recent tokens that a query sees, itself included
    sinks: int = 4  # the tokens at the start of each sequence that every query sees

    def validate(self, where: str) -> None:
        check_at_least(where, "window", self.window, 1)
        check_at_least(where, "sinks", self.sinks, 0)


class WindowAttention(LayerKind):
    """Restricts the attention module of a family; see the module's docstring.

    `paired_class` puts it in front of the family's class, so that `super().forward` is the family's attention. It
    finds its softmax in `attention/window_softmax.py`.
    """

    name: ClassVar[str] = "window"
    title: ClassVar[str] = "window + sinks"
    Settings: ClassVar[type[MixerSettings]] = WindowSettings
    new_weights: ClassVar[bool] = False
    in_tables: ClassVar[str] = "local"
    reads_further: ClassVar[bool] = True

    settings: WindowSettings
    layer_idx: int
    cache_bits: int = 16
    sink_bound: int | None = None  # the furthest position from which sinks are seen (`layer/layer_call.py`)

    @classmethod
    def default_settings(cls, profile: str, training: bool = True) -> WindowSettings:
        cls.only_faithful(profile)
        return WindowSettings(window=RECOMMENDED)

    @classmethod
    def from_attention(cls, attention: nn.Module, config: PreTrainedConfig, layer_idx: int, settings: Any) -> nn.Module:
        """The attention module itself, restricted in place.

        Raises:
            UserError: something has replaced the module's forward function (offloading, torch.compile).
        """
        require_own_forward(attention, layer_idx, "put the window on it")
        family = behind(WindowAttention, type(attention))
        attention.__class__ = paired_class(WindowAttention, family, f"Window{family.__name__}")
        attention.settings = settings
        attention.config = RoutedConfig(config, BY_CALL)  # type: ignore[assignment]
        return attention

    @property
    def window_tokens(self) -> int:
        return self.settings.window

    @property
    def sink_reach(self) -> int:
        return self.settings.window + self.settings.sinks

    def use_window(self, tokens: int) -> None:
        self.settings = replace(self.settings, window=tokens)

    def use_cache_bits(self, bits: int) -> None:
        """As in the base class.

        Raises:
            UserError: more sinks than the packed form has.
        """
        self.cache_bits = bits
        if bits < 16:
            _ = self.cache_spec

    def place_cache(self, cache: Cache) -> MixerCacheLayer:
        return cache_layer(cache, self.layer_idx, self.name, self.cache_class)

    @property
    def takes_prompt_length(self) -> bool:  # type: ignore[override]
        return self.cache_bits == 16

    @property
    def has_step(self) -> bool:
        """Whether a step finds its sequences by `CacheView.state_indices`."""
        return self.cache_bits < 16

    @property
    def full_title(self) -> str:
        return f"window of {self.settings.window:,}"

    @property
    def cache_spec(self) -> QuantisedCacheSpec:
        config: Any = self.config  # type: ignore[attr-defined]
        family_window = sliding_window(config, self.layer_idx)
        own = self.settings.window, self.settings.sinks
        return QuantisedCacheSpec.of(self.cache_bits, *own, family_window, getattr(self, "key_order", None))

    def state_shapes(self, dtype: torch.dtype) -> dict[str, TensorShape]:
        config: Any = self.config  # type: ignore[attr-defined]
        heads, head_dim = int(config.num_key_value_heads), int(self.head_dim)  # type: ignore[attr-defined]
        if self.cache_bits < 16:
            return self.cache_spec.shapes(heads, head_dim, 0)
        return window_shapes(heads, head_dim, self.settings.window + self.settings.sinks, dtype)

    def stored_bytes(self, dtype: torch.dtype, tokens: int, bits: int) -> int:
        config: Any = self.config  # type: ignore[attr-defined]
        heads, head_dim = int(config.num_key_value_heads), int(self.head_dim)  # type: ignore[attr-defined]
        own = self.settings.window, self.settings.sinks
        return held_bytes(heads, head_dim, tokens, bits, dtype, *own, sliding_window(config, self.layer_idx))

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Angles | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        cu_seq_lens_q: Tensor | None = None,
        padding: Tensor | None = None,
        prompt_length: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention's signature. hidden_states [B, T, hidden] -> ([B, T, hidden], attention weights or None).

        With `prompt_length` [1], the first tokens of a sequence, as many, are kept in 16 bits; padding follows them.

        Raises:
            ValueError: an attention implementation that takes no mask, a mask that cannot be read, or packed sequences
                together with a cache.
        """
        config: Any = self.config.whole  # type: ignore[attr-defined]
        implementation = config._attn_implementation
        if implementation not in TAKES_MASK:
            raise ValueError(
                f"attn_implementation: got {implementation!r}, which takes no mask for window + sinks; load the model "
                'with attn_implementation="sdpa" or "eager"'
            )
        batch, length, _ = hidden_states.shape
        call = LayerCall.of(self, length, attention_mask, given_cache(past_key_values, kwargs), cu_seq_lens_q, padding)
        if call.is_recorded:
            return recorded(self, call, hidden_states, position_embeddings), None
        turn = None
        if position_embeddings is not None:
            position_embeddings, turn = window_angles(position_embeddings, self.sink_bound, call.cache, length)
        if self.cache_bits < 16:
            inputs = {"hidden_states": hidden_states, "position_embeddings": position_embeddings, **kwargs}
            return call_packed(super().forward, self.cache_spec, call, inputs, turn)  # type: ignore[misc]
        cache, padding, packed, state = call.cache, call.padding, call.cu_seqlens, call.state or {}
        tokens = Tokens.of(batch, length, padding, packed, state.get("count"), hidden_states.device)
        window, sinks = self.settings.window, self.settings.sinks
        weights = bool(kwargs.get("output_attentions") or getattr(config, "output_attentions", False))
        in_place = length == 1 and padding is None and not weights and cache is not None and cache.may_change
        own = tokens if prompt_length is None else tokens.until(prompt_length)
        sink_cache = None if cache is None else SinkCache(window, sinks, state, own, in_place, packed)
        softmax = SoftmaxCall(
            tokens,
            sink_cache.seen if sink_cache is not None and state else tokens,
            Reach(window, sinks, sliding_window(config, self.layer_idx)),
            packed,
            in_order=padding is None and not state,
            eager=implementation == "eager",
            weights=weights,
            turn=turn,
        )
        result: tuple[Tensor, Tensor | None] = super().forward(  # type: ignore[misc]
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=None,
            call=softmax,
            **{CACHE: sink_cache},
            **kwargs,
        )
        if cache is not None and in_place:
            cache.count(1)
        elif cache is not None and sink_cache is not None:
            cache.advance(length, sink_cache.state)
        return result
