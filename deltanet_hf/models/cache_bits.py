"""How many bits a model's keys and values have in its cache: one setting for softmax layers, single heads and windows.

The `deltanet` entry of a converted model's configuration says it (`layers.py`), and the model is made with it.
`set_cache_bits` makes every forward pass see earlier keys and values as the cache holds them (`fake_quantisation.py`),
and packs them in the cache (`packed_tokens.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.attention.packed_softmax import pack_softmax
from deltanet_hf.mixers.cache.packed_reach import PackedReach
from deltanet_hf.mixers.layer.layer_kind import LayerKind, branches_of
from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_hf.mixers.layer.mixer import Mixer
from deltanet_hf.mixers.layer.window_branch import WindowBranch
from deltanet_hf.mixers.window import WindowAttention
from deltanet_hf.models.stateful import make_stateful
from deltanet_kernels.packed_cache.layout import PACKED_BITS

KEY_ORDER = "key_order"  # name of the buffers
BITS = (16, *PACKED_BITS, 3, 2)  # 3 and 2 are measured, but have no packed form


def set_cache_bits(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    """Let all softmax attention of a model, whole layers, single heads and windows, see its past in `bits` bits.

    The configuration of a converted model says so from then on, and is saved with it.

    Args:
        model: a converted or a softmax model; changed in place.
        bits: 16 leaves keys and values as they are.

    Raises:
        UserError: another number of bits, or a kind of layer that has no such form.
    """
    use_cache_bits(model, bits)
    config: Any = model.config
    if getattr(config, "deltanet", None) is not None:
        table = {key: value for key, value in config.deltanet.items() if key != "cache_bits"}
        config.deltanet = table if bits == 16 else {**table, "cache_bits": bits}
    return model


def use_cache_bits(model: PreTrainedModel, bits: int) -> None:
    """`set_cache_bits` for a while: the configuration goes on saying what it said."""
    if bits not in BITS:
        raise UserError(f"cache bits: got {bits!r}, expected one of {', '.join(map(str, BITS))}")
    decoder: Any = model.model
    for layer in decoder.layers:
        attention = getattr(layer, "self_attn", None)
        if attention is not None:  # else a linear layer of Qwen3.5
            use_bits_in(attention, bits)
    if bits < 16 and getattr(model.config, "deltanet", None) is None:
        make_stateful(model)


def use_bits_in(attention: Any, bits: int) -> None:
    """`use_cache_bits` for the attention of one layer."""
    for branch in branches_of(attention).values():
        if isinstance(branch, LayerKind):
            branch.use_cache_bits(bits)
        else:
            pack_softmax(branch, bits)


def add_key_order(model: PreTrainedModel) -> None:
    """Give every softmax attention, whole layers, single heads and windows, a buffer `key_order` (`PackedKeyValues`).

    Its channels stand in their own order until a checkpoint says another.
    """
    decoder: Any = model.model
    for layer in decoder.layers:
        for attention, heads in softmax_parts(layer.self_attn):
            order = torch.arange(attention.head_dim).expand(heads, 2, -1).contiguous()
            attention.register_buffer(KEY_ORDER, order)


def softmax_parts(attention: Any) -> Iterator[tuple[Any, int]]:
    """The modules of a layer's attention that keep keys and values, and their numbers of key/value heads."""
    for branch in branches_of(attention).values():
        if not isinstance(branch, Mixer):
            yield branch, int(branch.config.num_key_value_heads)
        elif branch.window_branch is not None:
            yield branch.window_branch, branch.window_branch.kv_heads


def cache_bits_of(model: PreTrainedModel) -> int:
    """The bits that `set_cache_bits` has set; 16 by default."""
    return min((getattr(module, "cache_bits", 16) for module in model.modules()), default=16)


def stored_bytes(model: PreTrainedModel, tokens: int, bits: int, dtype: torch.dtype | None = None) -> int:
    """Bytes of one sequence of `tokens` tokens in a cache of `bits` bits: keys, values, windows and states.

    Packed numbers have `bits` bits and, per `GROUP` of them, a scale and a lowest value of 16 bits. The current group
    of tokens and the sinks take 8 bits, and 16 per 16 channels. States are as the model keeps them.

    Args:
        dtype: in which the model runs; None for that of its weights.
    """
    decoder: Any = model.model
    return sum(layer_bytes(layer.self_attn, dtype or model.dtype, tokens, bits) for layer in decoder.layers)


def layer_bytes(attention: Any, dtype: torch.dtype, tokens: int, bits: int) -> int:
    """`stored_bytes` of the attention of one layer of a model of this dtype."""
    return sum(_branch_bytes(branch, dtype, tokens, bits) for branch in branches_of(attention).values())


def _branch_bytes(attention: Any, dtype: torch.dtype, tokens: int, bits: int) -> int:
    if isinstance(attention, Mixer):
        branch: WindowBranch | None = attention.window_branch
        shapes = attention.state_shapes(dtype)
        held = 0
        if branch is not None:
            held = held_bytes(branch.kv_heads, branch.head_dim, tokens, bits, dtype, branch.window, branch.sinks)
            shapes = {name: shape for name, shape in shapes.items() if name not in branch.state_names}
        return held + sum(shape.nbytes for shape in shapes.values())
    config: Any = attention.config
    window, sinks = None, 0
    if isinstance(attention, WindowAttention):
        window, sinks = attention.settings.window, attention.settings.sinks
    heads, size = int(config.num_key_value_heads), int(attention.head_dim)
    family_window = sliding_window(config, attention.layer_idx)
    return held_bytes(heads, size, tokens, bits, dtype, window, sinks, family_window)


def held_bytes(
    heads: int,
    size: int,
    tokens: int,
    bits: int,
    dtype: torch.dtype,
    window: int | None,
    sinks: int,
    family_window: int | None = None,
) -> int:
    """Bytes of the keys and values of `heads` heads of `size` channels; for the others see `PackedReach`."""
    if bits < 16:
        shapes = PackedReach.of(bits, window, sinks, family_window).shapes(heads, size, tokens)
        return sum(shape.nbytes for shape in shapes.values())
    seen = tokens if window is None else min(tokens, window + sinks)
    return 2 * heads * size * dtype.itemsize * (seen if family_window is None else min(seen, family_window))
