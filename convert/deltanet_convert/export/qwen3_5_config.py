"""Makes the config of an exported model, a Qwen3.5 dense text model."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from deltanet_hf.model_sizes import head_size
from deltanet_hf.model_types import family_type
from deltanet_hf.models.layers import LayerTable

from ..start.norm_config import DECODER_KEYS
from .obstacles import QWEN3_5_FAMILY
from .slots import Slots, fixed_interval

LINEAR = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "attention_bias",
)


def qwen3_5_config(config: Any, dtype: torch.dtype, slots: Slots, *, untied: bool) -> Qwen3_5TextConfig:
    """Makes the exported model's config.

    Args:
        config: the converted model's.
        dtype: dtype of the weights.
        slots: the layers of the export.
        untied: whether the output head is written although it shares the embedding's weights in the model.
    """
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
    if family_type(config) == QWEN3_5_FAMILY:
        values |= {name: getattr(config, name) for name in LINEAR}
        values["rope_parameters"] = config.rope_parameters
    else:
        values |= _linear(config, table) | {"attention_bias": False, "rope_parameters": _rope(config, bool(kept))}
    if not kept:
        values["num_key_value_heads"] = 1  # nothing reads the idle layer's cache, so it is as small as possible
    if untied:
        values["tie_word_embeddings"] = False
    return Qwen3_5TextConfig(**values)


def _linear(config: Any, table: LayerTable) -> dict[str, Any]:
    heads = int(config.num_attention_heads)  # the export repeats grouped key/value heads
    return {
        "linear_conv_kernel_dim": table.only_kind.settings.conv_size,
        "linear_key_head_dim": head_size(config),
        "linear_value_head_dim": head_size(config),
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
    }


def _rope(config: Any, used: bool) -> dict[str, Any]:
    """Rotary embedding of all channels of a head.

    In text, the three position axes of M-RoPE have equal values, so any split of the frequencies is correct.

    Args:
        used: whether any layer of the model uses the embedding (otherwise only the idle layer has it).
    """
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
