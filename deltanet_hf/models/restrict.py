"""Puts softmax layers of a model, or single key/value heads, under a window and sinks, without training.

Windows with sinks are the baseline of StreamingLLM (arXiv 2309.17453); heads that keep everything beside heads with
a window and sinks are that of DuoAttention (arXiv 2410.10819).

The windows are those of the model in memory: its configuration does not have them, so `save_pretrained` refuses it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.attention.family_attention import kind_of
from deltanet_hf.mixers.attention.head_split import narrow_weights
from deltanet_hf.mixers.mixed_heads import MixedHeads, MixedHeadsSettings
from deltanet_hf.mixers.window import WindowAttention, WindowSettings
from deltanet_hf.models.cache_bits import cache_bits_of, use_cache_bits
from deltanet_hf.models.stateful import make_stateful
from deltanet_hf.models.unwrapped import unwrapped


def restrict_to_window(
    model: PreTrainedModel, window: int = 64, sinks: int = 4, layers: Collection[int] | None = None
) -> PreTrainedModel:
    """Put softmax layers of `model` under a window and sinks, without training; returns the model itself.

    Layers with a recurrent state are not touched; of a layer with mixed heads, the softmax heads are restricted. A
    family's own sliding window stays in force: tokens outside of both are not seen.

    Args:
        model: a model of a supported family, converted or not, or a PEFT model around one.
        window: number of most recent tokens that a query sees, itself included (>= 1).
        sinks: number of tokens at the start of each sequence that all queries see (>= 0).
        layers: indices of the layers to restrict; None for all.

    Raises:
        UserError: a window or a number of sinks that makes no sense, or a model without such layers.
    """
    if window < 1 or sinks < 0:
        raise UserError(f"window must be >= 1 and sinks >= 0, got window={window}, sinks={sinks}")
    settings = WindowSettings(window, sinks)
    decoder: Any = getattr(unwrapped(model), "model", None)
    bits, found = cache_bits_of(model), False
    for index, layer in enumerate(getattr(decoder, "layers", ())):
        attention: Any = getattr(layer, "self_attn", None)
        if attention is not None and kind_of(attention).name not in ("softmax", WindowAttention.name):
            attention = getattr(attention, "softmax", None)  # of mixed heads
        if attention is None:
            continue
        if layers is not None and index not in layers:
            continue
        kind_of(attention).use_cache_bits(16)
        WindowAttention.from_attention(attention, attention.config, index, settings)
        attention.sink_bound = getattr(decoder.rotary_emb, "sink_bound", None)  # of a model that reads further
        found = True
    if not found:
        raise UserError(f"{type(model).__name__}: no softmax attention was found in it, so no window can be put on it")
    return _restricted(model, bits)


@torch.no_grad()
def restrict_heads(
    model: PreTrainedModel, kept: Mapping[int, Collection[int]], window: int | Sequence[int] = 64, sinks: int = 4
) -> PreTrainedModel:
    """Put every key/value head that is not in `kept` under a window and sinks; returns the model itself.

    Layers with all heads kept do not change. Layers with some heads kept become `MixedHeads`, with the weights cut up
    and their names changed; layers without a kept head become windows. A family's own sliding window stays in force.

    Args:
        model: a softmax model of a supported family, its weights in memory.
        kept: key/value heads that keep everything, by layer; layers that are not listed keep none.
        window: number of most recent tokens that a query sees, itself included (>= 1); or the numbers by layer.
        sinks: number of tokens at the start of each sequence that all queries see (>= 0).

    Raises:
        UserError: sizes, layers or heads that do not exist, a model that is converted, offloaded, quantised or has
            adapters, or a family whose heads do not part (OLMo 2 and 3).
    """
    decoder: Any = getattr(unwrapped(model), "model", None)
    layers = list(getattr(decoder, "layers", ()))
    count = int(getattr(model.config, "num_key_value_heads", 0))
    try:
        sizes = [
            WindowSettings.from_dict({"window": tokens, "sinks": sinks}, "restrict_heads")
            for tokens in ([window] * len(layers) if isinstance(window, int) else window)
        ]
    except ValueError as error:
        raise UserError(str(error)) from None
    for layer, heads in kept.items():
        if not 0 <= layer < len(layers) or any(not 0 <= head < count for head in heads):
            raise UserError(
                f"restrict_heads: layer {layer} with heads {sorted(heads)} is not in this model, which has layers 0 to "
                f"{len(layers) - 1} with key/value heads 0 to {count - 1}"
            )
    bits = cache_bits_of(model)
    for (index, layer), size in zip(enumerate(layers), sizes, strict=True):
        attention: Any = getattr(layer, "self_attn", None)
        _check(attention, index)
        kind_of(attention).use_cache_bits(16)
        here = set(kept.get(index, ()))
        if not here:
            WindowAttention.from_attention(attention, model.config, index, size)
        elif len(here) < count:
            layer.self_attn = _split(attention, model.config, index, here, size)
    return _restricted(model, bits)


def change_windows(model: PreTrainedModel, windows: Sequence[int]) -> None:
    """Give all windows of a model other lengths, by layer."""
    decoder: Any = model.model
    for layer, window in zip(decoder.layers, windows, strict=True):
        kind_of(layer.self_attn).use_window(window)


def _restricted(model: Any, bits: int) -> Any:
    """The model itself, with its cache in so many bits again, and marked as one that no folder describes."""
    inner = unwrapped(model)
    make_stateful(inner)
    inner.is_restricted = True
    use_cache_bits(inner, bits)
    return model


def _check(attention: Any, index: int) -> None:
    if attention is None or kind_of(attention).name != "softmax":
        raise UserError(
            f"layer {index}: no softmax attention whose heads could be restricted; give an unchanged teacher"
        )
    plain = all(type(part) is nn.Linear for name, part in attention.named_children() if name.endswith("_proj"))
    if not plain or any(parameter.is_meta for parameter in attention.parameters()) or "forward" in vars(attention):
        raise UserError(
            f"layer {index}: its attention is offloaded, compiled, quantised or has adapters; restrict its heads "
            "before that, or merge the adapters"
        )


def _split(attention: Any, config: Any, index: int, kept: set[int], sizes: WindowSettings) -> MixedHeads:
    """Mixed heads with the weights of `attention`: softmax for the heads in `kept`, windows for the others."""
    heads = tuple("softmax" if head in kept else "window" for head in range(config.num_key_value_heads))
    settings = MixedHeadsSettings(heads, sizes.window, sizes.sinks)  # type: ignore[arg-type]
    with torch.device("meta"):
        mixed = MixedHeads(attention, config, index, settings)
    for kind, indices in settings.branches.items():
        branch = getattr(mixed, kind)
        branch.load_state_dict(narrow_weights(attention, branch, indices), assign=True)
    trained = any(parameter.requires_grad for parameter in attention.parameters())
    return mixed.train(attention.training).requires_grad_(trained)
