"""The config of the exported model: a Qwen3.5 dense text model."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from deltanet_hf.models.layers import LayerTable

from ..decoder_config import DECODER_KEYS, head_size
from .obstacles import NATIVE_FAMILY, family_name
from .slots import Slots, fixed_interval

LINEAR = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "attention_bias",
)


def target_config(config: Any, dtype: torch.dtype, slots: Slots, *, untied: bool = False) -> Qwen3_5TextConfig:
    """The exported model's config. `untied`: the output head is written although the source shares it."""
    table = LayerTable.of(config)
    kept = table.softmax
    layers, softmax = len(slots.sources), slots.softmax
    values: dict[str, Any] = {name: getattr(config, name) for name in DECODER_KEYS}
    values |= {
        "architectures": ["Qwen3_5ForCausalLM"],
        "dtype": dtype,
        "num_hidden_layers": layers,
        "head_dim": head_size(config),
        "layer_types": ["full_attention" if i in softmax else "linear_attention" for i in range(layers)],
    }
    interval = fixed_interval(softmax, layers)
    if interval is not None:
        values["full_attention_interval"] = interval
    if family_name(config) == NATIVE_FAMILY:
        values |= {name: getattr(config, name) for name in LINEAR}
        values["rope_parameters"] = config.rope_parameters
    else:
        values |= _linear(config, table) | {"attention_bias": False, "rope_parameters": _rope(config, bool(kept))}
    if not kept:
        values["num_key_value_heads"] = 1  # the idle layer's cache is of no use: as small as it can be
    if untied:
        values["tie_word_embeddings"] = False
    return Qwen3_5TextConfig(**values)


def _linear(config: Any, table: LayerTable) -> dict[str, Any]:
    heads = int(config.num_attention_heads)  # grouped key/value heads are repeated
    return {
        "linear_conv_kernel_dim": table.only_kind.settings.conv_size,
        "linear_key_head_dim": head_size(config),
        "linear_value_head_dim": head_size(config),
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
    }


def _rope(config: Any, used: bool) -> dict[str, Any]:
    """Rotation of the whole head. In text all of M-RoPE's position axes agree, so any split of the frequencies does."""
    teacher = dict(config.rope_parameters or {})
    rope = teacher if used else {"rope_theta": teacher.get("rope_theta", 10000.0)}
    half = head_size(config) // 2
    time = -(-half // 3)
    height = -(-(half - time) // 2)
    return {
        "rope_type": "default",
        **rope,
        "partial_rotary_factor": 1.0,
        "mrope_section": [time, height, half - time - height],
        "mrope_interleaved": True,
    }
