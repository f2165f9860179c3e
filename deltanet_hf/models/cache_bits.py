"""How many bits a model's keys and values have in its cache: one setting for softmax layers, single heads and windows.

`set_cache_bits` makes every forward pass see earlier keys and values as the cache holds them (`fake_quantisation.py`),
and packs them in the cache (`packed_tokens.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.base import Mixer
from deltanet_hf.mixers.layer_kind import LayerKind
from deltanet_hf.mixers.mixed_heads import MixedHeads
from deltanet_hf.mixers.packed_softmax import pack_softmax
from deltanet_hf.mixers.packed_tokens import Kept
from deltanet_hf.mixers.stateful import make_stateful
from deltanet_hf.mixers.window import WindowAttention, announce
from deltanet_hf.mixers.window_branch import WindowBranch

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
    if bits < 16 and not hasattr(model.config, "deltanet"):
        announce(decoder)
        make_stateful(model)
        model._is_stateful = True
    return model


def _set(attention: Any, bits: int) -> None:
    if isinstance(attention, Mixer):
        if attention.window_branch is not None:
            attention.window_branch.cache_bits = bits
    elif isinstance(attention, WindowAttention):
        attention.cache_bits = bits
    elif not isinstance(attention, LayerKind):
        pack_softmax(attention, bits)
    elif bits < 16:
        raise UserError(f"cache bits: {attention.name} layers keep every token in 16 bits")


def cache_bits_of(model: PreTrainedModel) -> int:
    """The bits that `set_cache_bits` has set; 16 by default."""
    return min((getattr(module, "cache_bits", 16) for module in model.modules()), default=16)


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
    if isinstance(attention, Mixer):
        branch: WindowBranch | None = attention.window_branch
        shapes = attention.state_shapes(model.dtype)
        kept = 0
        if branch is not None:
            kept = _held(branch.kv_heads, branch.head_dim, tokens, branch.window, branch.sinks, bits, model.dtype)
            shapes = {name: shape for name, shape in shapes.items() if name not in branch.state_names}
        return kept + sum(shape.nbytes for shape in shapes.values())
    config: Any = attention.config
    window, sinks = None, 0
    if isinstance(attention, WindowAttention):
        window, sinks = attention.settings.window, attention.settings.sinks
    heads, size = int(config.num_key_value_heads), int(attention.head_dim)
    return _held(heads, size, tokens, window, sinks, bits, model.dtype)


def _held(heads: int, size: int, tokens: int, window: int | None, sinks: int, bits: int, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of `heads` heads of `size` channels."""
    if bits == 16:
        return 2 * heads * size * dtype.itemsize * (tokens if window is None else min(tokens, window + sinks))
    return sum(shape.nbytes for shape in Kept(bits, window, sinks).shapes(heads, size, tokens, dtype).values())
