"""The base of the kinds that stay quadratic: a family's softmax attention, with something added before its softmax.

The layer is the family's own attention module, with its weights and their names. The family computes projections,
learned norms and rotary embedding; `attend` then gets q, k and v, changes or extends them, keeps them in the cache and
runs the softmax, with the family's scaling, capped scores, dropout and sliding window. At the start each kind is the
softmax attention that it replaces: what it adds is 0.

The cache is the key/value layer that transformers makes for softmax attention, and grows with every token.

Shapes in comments: B batch, T tokens, S tokens with those in the cache, D head size; HQ and HK query and key/value
heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from deltanet_hf.mixers.attention.paired_class import paired_class, require_own_forward
from deltanet_hf.mixers.attention.routed_config import RoutedConfig
from deltanet_hf.mixers.attention.single_query import TAKES_MASK
from deltanet_hf.mixers.cache.argument import given_cache
from deltanet_hf.mixers.cache.key_values import QUANTISED
from deltanet_hf.mixers.cache.state import TensorShape
from deltanet_hf.mixers.cache.window_cache import Tokens
from deltanet_hf.mixers.layer.layer_kind import LayerKind, PositionEmbeddings, softmax_bytes
from deltanet_hf.mixers.layer.masks import boundaries_in, padding_in, sliding_window, visible
from deltanet_hf.mixers.layer.settings import MixerSettings

IMPLEMENTATION = "deltanet_attention_kind"  # the name under which the families' attention finds `_attend`


@dataclass(frozen=True)
class Call:
    """One call of a layer, without q, k and v."""

    x: Tensor  # [B, T, hidden]
    padding: Tensor | None  # [B, T] bool, True at padding
    mask: Tensor | None  # [B or 1, 1, T, S] bool, True where a query may see a key; None for causal attention
    cu_seqlens: Tensor | None  # [N + 1] boundaries of packed sequences over the B*T tokens
    cache: Cache | None


@dataclass  # not frozen: torch.compile in torch 2.11 cannot call an instance of a frozen data class
class Softmax:
    """The softmax of a family's attention."""

    module: Any
    scaling: float
    dropout: float
    softcap: float | None
    sinks: Tensor | None  # [HQ], see `cache/sinks_apart.py`

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention [B, T, HQ, D] of q [B, HQ, T, E] to k [B, HK, S, E] and v [B, HK, S, D], E >= D.

        Channels from D on add to the scores, behind the cap. It is PyTorch's SDPA, but for capped scores and learned
        sinks, whose scores are in memory for all pairs of tokens at once.
        """
        size = v.shape[-1]
        if self.softcap is not None or self.sinks is not None:
            return self._eager(q, k, v, mask)
        if q.shape[2] > 1 and k.shape[-1] != size:  # flash attention takes one head size only
            v = F.pad(v, (0, k.shape[-1] - size))
        output, _ = sdpa_attention_forward(
            self.module, q, k, v, mask, dropout=self.dropout, scaling=self.scaling, is_causal=True
        )
        return output[..., :size]

    def _eager(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        length, size = q.shape[2], v.shape[-1]
        if mask is None and length > 1:
            k, v = k[:, :, :length], v[:, :, :length]  # of a static cache that was empty
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        k, v = (repeat_kv(x, self.module.num_key_value_groups) for x in (k, v))
        scores = (q[..., :size] @ k[..., :size].mT).to(torch.promote_types(q.dtype, torch.float32)) * self.scaling
        if self.softcap is not None:
            scores = (scores / self.softcap).tanh() * self.softcap
        scores = scores + (q[..., size:].to(scores.dtype) @ k[..., size:].to(scores.dtype).mT) * self.scaling
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        if self.sinks is not None:
            sinks = self.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = F.dropout(scores.softmax(-1)[..., : k.shape[2]].to(v.dtype), self.dropout)
        return (weights @ v).transpose(1, 2)


class AttentionKind(LayerKind):
    """Adds something to the attention module of a family; see the module's docstring.

    A subclass defines `add_parts`, `new_parts`, `start_neutral` and `attend`. `paired_class` puts it in front of the
    family's class, so that `super().forward` is the family's attention.
    """

    Settings: ClassVar[type[MixerSettings]] = MixerSettings  # none: all about them is trained
    in_tables: ClassVar[str] = "global"
    keeps_all_tokens: ClassVar[bool] = True

    settings: Any
    config: Any
    layer_idx: int
    head_dim: int
    o_proj: Any

    @classmethod
    def from_attention(cls, attention: nn.Module, config: PreTrainedConfig, layer_idx: int, settings: Any) -> nn.Module:
        """The attention module itself, extended in place.

        Raises:
            UserError: something has replaced the module's forward function (offloading, torch.compile).
        """
        require_own_forward(attention, layer_idx, f"make the {cls.name} layer")
        extended: Any = attention
        extended.__class__ = paired_class(cls, type(attention), f"{cls.__name__}{type(attention).__name__}")
        extended.settings, extended.config = settings, RoutedConfig(config, IMPLEMENTATION)
        extended.add_parts(int(config.hidden_size), int(config.num_attention_heads), int(config.num_key_value_heads))
        return attention

    # What a subclass says.

    def add_parts(self, hidden: int, query_heads: int, kv_heads: int) -> None:
        """Make the modules that the family's attention does not have; `new_parts` lists them."""
        raise NotImplementedError

    def start_neutral(self, spread: float) -> None:
        """Give the new parts the values at which the layer is softmax attention; `spread` is the std of projections."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, softmax: Softmax) -> Tensor:
        """The attention.

        Args:
            q, k, v: [B, HQ, T, D], [B, HK, T, D], [B, HK, T, D] behind norms and rotation.

        Returns:
            [B, T, HQ, D].
        """
        raise NotImplementedError

    # What all share.

    @property
    def growing_heads(self) -> int:
        return int(self.config.num_key_value_heads)

    def state_shapes(self, dtype: torch.dtype) -> dict[str, TensorShape]:
        return {}

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

        Without an `attention_mask`, the family's sliding window and the packed sequences in `cu_seq_lens_q` are masked
        here, as when a layer is called alone.

        Raises:
            ValueError: an attention implementation that takes no mask, a mask that cannot be read, or packed sequences
                together with a cache.
        """
        implementation = self.config.whole._attn_implementation
        if implementation not in (*TAKES_MASK, None):
            raise ValueError(
                f"attn_implementation: got {implementation!r}, which makes no mask for {self.name} layers; load the "
                'model with attn_implementation="sdpa" or "eager"'
            )
        batch, length, _ = hidden_states.shape
        cache = given_cache(past_key_values, kwargs)
        cu_seqlens = boundaries_in(cu_seq_lens_q, length, cache)
        seen = 0 if cache is None else cache.get_seq_length(self.layer_idx)
        padding = padding_in(attention_mask, padding, length, seen)
        window = sliding_window(self.config.whole, self.layer_idx)
        if attention_mask is not None and attention_mask.dim() != 4:
            raise ValueError(f"attention_mask: got shape {tuple(attention_mask.shape)}, expected [B, 1, T, S]")
        mask = None if attention_mask is None else visible(attention_mask)
        if mask is None and cache is None and (cu_seqlens is not None or length > (window or length)):
            tokens = Tokens.of(batch, length, None, cu_seqlens, None, hidden_states.device)
            mask = tokens.sees(tokens, length, 0, window).unsqueeze(1)
        output, _ = super().forward(  # type: ignore[misc]
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=None,
            call=Call(hidden_states, padding, mask, cu_seqlens, cache),
            **kwargs,
        )
        return output, None

    def held(self, cache: Cache | None) -> Any:
        """This layer's part of a cache, if it holds tokens; else None.

        Raises:
            ValueError: a quantised cache, which rounds what this kind of layer keeps beside keys and values.
        """
        if cache is None or len(cache.layers) <= self.layer_idx:
            return None
        layer: Any = cache.layers[self.layer_idx]
        if any(hasattr(layer, name) for name in QUANTISED):
            raise ValueError(f"cache: a quantised cache rounds what {self.name} layers keep; use another one")
        if not layer.is_initialized or layer.keys is None or layer.keys.numel() == 0:
            return None
        if cache.offloading:  # the copy from the CPU was begun by the layer before
            torch.cuda.default_stream(layer.device).wait_stream(cache.prefetch_stream)
        return layer


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    call: Call | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that a family's attention calls in the place of SDPA."""
    assert call is not None
    softmax = Softmax(module, query.shape[-1] ** -0.5 if scaling is None else scaling, dropout, softcap, s_aux)
    return module.attend(query, key, value, call, softmax).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, _attend)
