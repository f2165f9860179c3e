"""How many bits a model's keys and values have in its cache: one setting for softmax layers, single heads and windows.

`set_cache_bits` makes every forward pass see earlier keys and values as the cache holds them (`fake_quantisation.py`).
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.base import Mixer
from deltanet_hf.mixers.fake_quantisation import GROUP, SINKS, quantised_attention
from deltanet_hf.mixers.layer_kind import LayerKind
from deltanet_hf.mixers.mixed_heads import MixedHeads
from deltanet_hf.mixers.routed_config import RoutedConfig
from deltanet_hf.mixers.window import WindowAttention
from deltanet_hf.mixers.window_branch import WindowBranch

IMPLEMENTATION = "deltanet_quantised"  # the name under which the families' attention finds `_attend`
BITS = (16, 8, 4, 3, 2)  # 3 and 2 are measured, but have no packed form


def set_cache_bits(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    """Let all softmax attention of a model, whole layers, single heads and windows, see its past in `bits` bits.

    Args:
        model: a converted or a softmax model; changed in place.
        bits: 16 leaves keys and values as they are.

    Raises:
        UserError: another number of bits, or a kind of layer that has no such form.
    """
    if bits not in BITS:
        raise UserError(f"cache bits: got {bits!r}, expected one of {', '.join(map(str, BITS))}")
    decoder: Any = model.model
    for layer in decoder.layers:
        attention = getattr(layer, "self_attn", None)
        if attention is None:  # a linear layer of Qwen3.5
            continue
        branches = list(attention.branches.values()) if isinstance(attention, MixedHeads) else [attention]
        for branch in branches:
            _set(branch, bits)
    return model


def _set(attention: Any, bits: int) -> None:
    if isinstance(attention, Mixer):
        if attention.window_branch is not None:
            attention.window_branch.cache_bits = bits
    elif hasattr(attention, "sinks"):
        raise UserError("cache bits: attention with learned sinks keeps every token in 16 bits")
    elif isinstance(attention, WindowAttention) or not isinstance(attention, LayerKind):
        attention.cache_bits = bits
        if not isinstance(attention, WindowAttention):
            config = attention.config
            attention.config = RoutedConfig(config, IMPLEMENTATION) if bits < 16 else getattr(config, "whole", config)
    elif bits < 16:
        raise UserError(f"cache bits: {attention.name} layers keep every token in 16 bits")


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that a family's attention calls: [B, HQ, T, D], [B, HK, T, D] -> [B, T, HQ, D]."""
    if query.shape[2] != key.shape[2] or attention_mask is not None:
        raise ValueError(
            "cache bits: a forward pass without a cache takes whole sequences, padded on the right at most"
        )
    q, k, v = (states.transpose(1, 2) for states in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    length = q.shape[1]
    window = length if sliding_window is None else min(sliding_window, length)
    output, _ = quantised_attention(q, k, v, window, 0, scale, module.cache_bits, softcap)
    return output, None


AttentionInterface.register(IMPLEMENTATION, _attend)


def stored_bytes(model: PreTrainedModel, tokens: int, bits: int) -> int:
    """Bytes of one sequence of `tokens` tokens in a cache of `bits` bits: keys, values, windows and states.

    Packed numbers have `bits` bits and, per `GROUP` of them, a scale and a lowest value of 16 bits. The current group
    of tokens and the sinks take 16 bits. States are as the model keeps them.
    """
    decoder: Any = model.model
    total = 0
    for layer in decoder.layers:
        attention = layer.self_attn
        branches = list(attention.branches.values()) if isinstance(attention, MixedHeads) else [attention]
        total += sum(_branch_bytes(branch, model, tokens, bits) for branch in branches)
    return total


def _branch_bytes(attention: Any, model: PreTrainedModel, tokens: int, bits: int) -> int:
    config: Any = attention.config if hasattr(attention, "config") else model.config
    if isinstance(attention, Mixer):
        branch: WindowBranch | None = attention.window_branch
        kept = 0 if branch is None else _held(branch.kv_heads, branch.head_dim, tokens, branch.window, bits)
        return kept + _state_bytes(attention, model, () if branch is None else WindowBranch.STATE)
    heads, size = int(config.num_key_value_heads), int(attention.head_dim)
    window = attention.settings.window if isinstance(attention, WindowAttention) else None
    return _held(heads, size, tokens, window, bits)


def _held(heads: int, size: int, tokens: int, window: int | None, bits: int) -> int:
    """Bytes of the keys and values of `heads` heads of `size` channels."""
    token = 2 * heads * size * 2  # bytes of a token in 16 bits
    if bits == 16:
        return token * (tokens if window is None else min(tokens, window + SINKS))
    groups = tokens // GROUP if window is None else min(tokens // GROUP, math.ceil((window - 1) / GROUP))
    packed = groups * GROUP * token * (bits + 32 / GROUP) / 16
    return round(packed) + token * (min(tokens, GROUP) + min(tokens, SINKS))


def _state_bytes(attention: nn.Module, model: PreTrainedModel, without: tuple[str, ...]) -> int:
    shapes = attention.state_shapes(model.dtype)  # type: ignore[operator]
    return sum(shape.nbytes for name, shape in shapes.items() if name not in without)
