"""How many bits a model's keys and values have in its cache: one setting for softmax layers, single heads and windows.

The `deltanet` entry of a converted model's configuration says it (`layers.py`), and the model is made with it.
`set_cache_bits` makes every forward pass see earlier keys and values as the cache holds them, and packs them in the
cache (`quantised_kv_cache.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.attention.family_attention import kind_of
from deltanet_hf.mixers.attention.still_key_bias import drop_still_key_bias
from deltanet_hf.mixers.cache.quantised_cache_spec import check_packable
from deltanet_hf.models.stateful import make_stateful
from deltanet_hf.models.unwrapped import decoder_layers, unwrapped
from deltanet_kernels.packed_cache.layout import PACKED_BITS

KEY_ORDER = "key_order"  # name of the buffers
BITS = (16, *PACKED_BITS, 3, 2)  # 3 and 2 are measured, but have no packed form


def set_cache_bits(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    """Let all softmax attention of a model, whole layers, single heads and windows, see its past in `bits` bits.

    The configuration of a converted model says so from then on, and is saved with it. With fewer than 16 bits, a
    softmax model loses the biases of keys that softmax does not see (`still_key_bias.py`).

    Args:
        model: a converted or a softmax model, or a PEFT model around one; changed in place.
        bits: 16 leaves keys and values as they are.

    Raises:
        UserError: another number of bits, or heads or a kind of layer that have no such form; the model is as before.
    """
    use_cache_bits(model, bits)
    config: Any = unwrapped(model).config
    if getattr(config, "deltanet", None) is not None:
        table = {key: value for key, value in config.deltanet.items() if key != "cache_bits"}
        config.deltanet = table if bits == 16 else {**table, "cache_bits": bits}
    return model


def use_cache_bits(model: Any, bits: int) -> None:
    """`set_cache_bits` for a while: the configuration goes on saying what it said."""
    if bits not in BITS:
        raise UserError(f"cache bits: got {bits!r}, expected one of {', '.join(map(str, BITS))}")
    model = unwrapped(model)
    if not (layers := decoder_layers(model)):
        raise UserError(
            f"cache bits: {type(model).__name__} has no `model.layers` that could be quantised; leave it at 16"
        )
    attentions = (getattr(layer, "self_attn", None) for layer in layers)
    kinds = [kind_of(attention) for attention in attentions if attention is not None]  # linear layers of Qwen3.5
    before = cache_bits_of(model)
    try:
        for kind in kinds:
            for part, _ in kind.softmax_parts if bits < 16 else ():
                check_packable(part.head_dim, bits)
            kind.use_cache_bits(bits)
    except UserError:
        for kind in kinds:
            kind.use_cache_bits(before)
        raise
    model.model.cache_bits = bits  # which `check_call` compares with a cache's
    if bits < 16 and getattr(model.config, "deltanet", None) is None:
        make_stateful(model)
        for part, _ in (part for kind in kinds for part in kind.softmax_parts):
            drop_still_key_bias(part, model.model.rotary_emb, model.config.max_position_embeddings)


def add_key_order(model: PreTrainedModel) -> None:
    """Give every softmax attention, whole layers, single heads and windows, a buffer `key_order` (`PackedKeyValues`).

    Its channels stand in their own order until a checkpoint says another.
    """
    decoder: Any = model.model
    for layer in decoder.layers:
        for attention, heads in kind_of(layer.self_attn).softmax_parts:
            order = torch.arange(attention.head_dim).expand(heads, 2, -1).contiguous()
            attention.register_buffer(KEY_ORDER, order)


def cache_bits_of(model: PreTrainedModel) -> int:
    """The bits that `set_cache_bits` has set; 16 by default."""
    return min((getattr(module, "cache_bits", 16) for module in model.modules()), default=16)


def stored_bytes(model: PreTrainedModel, tokens: int, bits: int, dtype: torch.dtype | None = None) -> int:
    """Bytes of one sequence of `tokens` tokens in a cache of `bits` bits: keys, values, windows and states.

    Packed numbers have `bits` bits and, per 32 of them, a scale and a lowest value of 16 bits. The current group
    of tokens and the sinks take 8 bits, and 16 per 16 channels. States are as the model keeps them.

    Args:
        dtype: in which the model runs; None for that of its weights.
    """
    decoder = unwrapped(model).model
    return sum(layer_bytes(layer.self_attn, dtype or model.dtype, tokens, bits) for layer in decoder.layers)


def layer_bytes(attention: Any, dtype: torch.dtype, tokens: int, bits: int) -> int:
    """`stored_bytes` of the attention of one layer of a model of this dtype."""
    return kind_of(attention).stored_bytes(dtype, tokens, bits)
