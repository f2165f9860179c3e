"""Softmax attention over a sliding window and attention sinks, with a cache of constant size.

Every query sees the last `window` tokens (itself included) and the first `sinks` tokens of its own sequence (Xiao et
al., Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453). Positions stay those of the
unrestricted model. Distances are counted in tokens that are not padding.

The layer is the family's own attention module, with its weights and their names: only the mask and the cache differ,
so everything a family does in its attention (learned norms, capped scores, a sliding window of its own) stays as it
is. Long texts are read without a mask over all pairs of tokens (`window_softmax.py`). It is a kind of layer for
`deltanet-hf convert --mixer window`, and the baseline that needs no training.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.layer_kind import LayerKind, PositionEmbeddings, TensorShape
from deltanet_hf.mixers.masks import announce_packing, announce_padding, packed_in, padding_in, sliding_window
from deltanet_hf.mixers.packed_softmax import call_packed
from deltanet_hf.mixers.packed_tokens import Kept
from deltanet_hf.mixers.paired_class import paired_class
from deltanet_hf.mixers.recorded_call import recorded
from deltanet_hf.mixers.routed_config import RoutedConfig
from deltanet_hf.mixers.settings import MixerSettings, check_at_least
from deltanet_hf.mixers.single_query import TAKES_MASK
from deltanet_hf.mixers.state import MixerCacheLayer, cache_layer
from deltanet_hf.mixers.stateful import check_call, make_stateful
from deltanet_hf.mixers.window_cache import KeptTokens, Tokens
from deltanet_hf.mixers.window_softmax import IMPLEMENTATION, Reach, WindowCall


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
    finds its softmax in `window_softmax.py`.
    """

    name: ClassVar[str] = "window"
    title: ClassVar[str] = "window + sinks"
    Settings: ClassVar[type[MixerSettings]] = WindowSettings
    new_weights: ClassVar[bool] = False

    settings: WindowSettings
    layer_idx: int
    cache_bits: int = 16

    @classmethod
    def default_settings(cls, profile: str, training: bool = True) -> WindowSettings:
        if profile != "faithful":
            raise ValueError(f"profile: got {profile!r}, but {cls.name} has only faithful")
        return WindowSettings()

    @classmethod
    def from_attention(cls, attention: nn.Module, config: PreTrainedConfig, layer_idx: int, settings: Any) -> nn.Module:
        """The attention module itself, restricted in place.

        Raises:
            UserError: something has replaced the module's forward function (offloading, torch.compile).
        """
        if "forward" in vars(attention):
            raise UserError(
                f"layer {layer_idx}: its attention is offloaded or compiled; put the window on it before that"
            )
        family = _unrestricted(type(attention))  # type: ignore[arg-type]
        attention.__class__ = paired_class(WindowAttention, family, f"Window{family.__name__}")
        attention.settings = settings
        attention.config = RoutedConfig(config, IMPLEMENTATION)  # type: ignore[assignment]
        return attention

    def place_cache(self, cache: Cache) -> None:
        cache_layer(cache, self.layer_idx, self.name)

    @property
    def kept(self) -> Kept:
        config: Any = self.config  # type: ignore[attr-defined]
        limit = sliding_window(config, self.layer_idx)
        return Kept.of(self.cache_bits, self.settings.window, self.settings.sinks, limit)

    def state_shapes(self, dtype: torch.dtype) -> dict[str, TensorShape]:
        config: Any = self.config  # type: ignore[attr-defined]
        if self.cache_bits < 16:
            heads, head_dim = int(config.num_key_value_heads), int(self.head_dim)  # type: ignore[attr-defined]
            return self.kept.shapes(heads, head_dim, 0, dtype)
        slots = self.settings.window + self.settings.sinks
        heads, head_dim = int(config.num_key_value_heads), int(self.head_dim)  # type: ignore[attr-defined]
        return {
            "keys": TensorShape((heads, slots, head_dim), dtype),
            "values": TensorShape((heads, slots, head_dim), dtype),
            "numbers": TensorShape((slots,), torch.int32),
            "count": TensorShape((), torch.int32),
        }

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: PositionEmbeddings | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        cu_seq_lens_q: Tensor | None = None,
        padding: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention's signature. hidden_states [B, T, hidden] -> ([B, T, hidden], attention weights or None).

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
        cache = None if past_key_values is None else cache_layer(past_key_values, self.layer_idx, self.name)
        padding = padding_in(attention_mask, padding, length, 0 if cache is None else cache.get_seq_length())
        packed = packed_in(cu_seq_lens_q, length, cache)
        if cache is not None and cache.record_past:
            again = functools.partial(self.call_on, cache)
            return recorded(cache, again, hidden_states, position_embeddings, padding), None
        if self.cache_bits < 16:
            inputs = {"hidden_states": hidden_states, "position_embeddings": position_embeddings, **kwargs}
            return call_packed(super().forward, self.kept, cache, padding, packed, inputs)  # type: ignore[misc]
        state = cache.state if cache is not None and cache.is_initialized else {}
        tokens = Tokens.of(batch, length, padding, packed, state.get("count"), hidden_states.device)
        window, sinks = self.settings.window, self.settings.sinks
        kept = None if cache is None else KeptTokens(window, sinks, state, tokens)
        call = WindowCall(
            tokens,
            tokens if kept is None else kept.seen,
            Reach(window, sinks, sliding_window(config, self.layer_idx)),
            packed,
            in_order=padding is None and not state,
            eager=implementation == "eager",
            weights=bool(kwargs.get("output_attentions") or getattr(config, "output_attentions", False)),
        )
        output, weights = super().forward(  # type: ignore[misc]
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=None,
            past_key_values=kept,
            call=call,
            **kwargs,
        )
        if cache is not None:
            assert kept is not None
            cache.advance(length, kept.state)
        return output, weights

    def call_on(
        self, cache: MixerCacheLayer, x: Tensor, position_embeddings: PositionEmbeddings | None, mask: Tensor | None
    ) -> Tensor:
        """As in `Mixer`."""
        output: Tensor = self(  # type: ignore[operator]
            hidden_states=x, position_embeddings=position_embeddings, attention_mask=mask, past_key_values=cache
        )[0]
        return output


def _unrestricted(attention: type[nn.Module]) -> type[nn.Module]:
    """The family's class, which `paired_class` has put second."""
    return attention.__bases__[1] if issubclass(attention, WindowAttention) else attention


def restrict_to_window(
    model: PreTrainedModel, window: int = 64, sinks: int = 4, layers: Collection[int] | None = None
) -> PreTrainedModel:
    """Put softmax layers of `model` under a window and sinks, without training; returns the model itself.

    Layers with a recurrent state are not touched; of a layer with mixed heads, the softmax heads are restricted. A
    family's own sliding window stays in force: tokens outside of both are not seen.

    Args:
        model: a model of a supported family, converted or not.
        window: number of most recent tokens that a query sees, itself included (>= 1).
        sinks: number of tokens at the start of each sequence that all queries see (>= 0).
        layers: indices of the layers to restrict; None for all.

    Raises:
        UserError: a window or a number of sinks that makes no sense, or a model without such layers.
    """
    if window < 1 or sinks < 0:
        raise UserError(f"window must be >= 1 and sinks >= 0, got window={window}, sinks={sinks}")
    settings = WindowSettings(window, sinks)
    decoder: Any = getattr(model, "model", None)
    found = False
    for index, layer in enumerate(getattr(decoder, "layers", ())):
        attention: Any = getattr(layer, "self_attn", None)
        if isinstance(attention, LayerKind) and attention.name != WindowAttention.name:
            attention = getattr(attention, "softmax", None)  # of mixed heads
        if attention is None:
            continue
        if layers is not None and index not in layers:
            continue
        WindowAttention.from_attention(attention, attention.config, index, settings)
        found = True
    if not found:
        raise UserError(f"{type(model).__name__}: no softmax attention was found in it, so no window can be put on it")
    announce(decoder)
    make_stateful(model)
    model._is_stateful = True
    return model


def announce(decoder: nn.Module) -> None:
    """Make packed rows and padding known to the layers of a decoder, and check its calls, once."""
    present = decoder._forward_pre_hooks.values()
    for hook in (check_call, announce_packing, announce_padding):
        if hook not in present:
            decoder.register_forward_pre_hook(hook, with_kwargs=True)
