"""Tiny teachers with random weights, one per family, each with the special features of its family."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from deltanet_hf import LayerTable, converted_config
from deltanet_hf.models import qwen3_5
from deltanet_hf.models.cache_bits import KEY_ORDER
from deltanet_hf.models.factory import model_class
from deltanet_hf.models.families import FAMILIES
from deltanet_hf.models.layers import Kind

LAYERS = 4
READS_ALL: dict[str, Any] = {"delayed": False}
"""Settings of a state beside a window that reads all tokens."""
COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
TINY_SHAPE: dict[str, Any] = {  # takes the place of a model in `random_models.SHAPES`
    **{name: COMMON[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")},
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
SLIDING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
PECULIAR: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 8, "head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "olmo2": {},
    "olmo3": {"sliding_window": 8, "layer_types": SLIDING},
    "granite": {
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "logits_scaling": 4.0,
    },
    "smollm3": {"no_rope_layers": [1, 1, 0, 1], "layer_types": None},
    "gemma2": {"sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 12, "layer_types": SLIDING},
    "gemma3_text": {"sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 12, "layer_types": SLIDING},
    "phi3": {"partial_rotary_factor": 0.5},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"sliding_window": 8, "num_local_experts": 4},
    "granitemoe": {
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "logits_scaling": 4.0,
        "num_local_experts": 4,
    },
    "gpt_oss": {
        "sliding_window": 8,
        "head_dim": 16,
        "layer_types": SLIDING,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}
ONE_NORM = {"olmo2", "olmo3", "olmoe"}  # one q/k norm over all heads of a layer, so that their heads do not part
HYBRID = (0, 2)  # converted layers of a hybrid; every second layer keeps softmax attention


def mixture_table() -> LayerTable:
    """All kinds of layers in one model; the last two are a sliding and a full attention layer in some families."""
    kinds = {
        "linear": LayerTable.preset(1).only_kind,
        "local": LayerTable.preset(1, "window", window=5, sinks=2).only_kind,
    }
    return LayerTable(kinds, ("linear", "softmax", "local", "local"))


def mixed_heads(*heads: str, **changes: Any) -> Kind:
    """Mixed heads with these kinds per key/value head."""
    changes = {"heads": list(heads), "window": 5, "sinks": 2, **changes}
    return LayerTable.preset(1, "mixed_heads", **changes).only_kind


def mixed_table(*heads: str, **changes: Any) -> LayerTable:
    """Mixed heads in every layer."""
    return LayerTable({"mixed": mixed_heads(*heads, **changes)}, ("mixed",) * LAYERS)


def mixed_mixture_table(**changes: Any) -> LayerTable:
    """Layers with different mixed heads beside a softmax layer; the linear heads of some have a window too."""
    made = LayerTable.preset(1, "gated_deltanet+window", window=5, state_dtype="float32", **changes)
    both = made.only_kind.settings.to_dict()
    kinds = {"near": mixed_heads("window", "linear"), "far": mixed_heads("linear", "softmax", linear=both)}
    return LayerTable(kinds, ("far", "near", "softmax", "far"))


def teacher_config(model_type: str, **changes: Any) -> Any:
    """The family's tiny configuration."""
    return FAMILIES[model_type].config_class(**{**COMMON, **PECULIAR[model_type], **changes})


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Sets random weights, norms and biases included, so that no result is correct only because they are 0 or 1; and
    random key orders."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.3 * noise)
            elif name.endswith("A_log"):
                parameter.copy_(noise)
            else:
                parameter.copy_(0.2 * noise)
        for name, order in model.named_buffers():
            if name.endswith(KEY_ORDER):
                order[:, 0] = torch.rand(order[:, 0].shape, generator=generator).argsort()
                order[:, 1] = order[:, 0].argsort()


def tiny_teacher(model_type: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A softmax teacher in float32, in eval mode."""
    model = FAMILIES[model_type].model_class(teacher_config(model_type, **changes))
    randomise(model, seed)
    return model.eval()


def tiny_table(profile: str = "faithful", layers: tuple[int, ...] | None = None, **changes: Any) -> LayerTable:
    """The layer table of a tiny student; `layers` are the converted ones, by default all."""
    softmax = () if layers is None else tuple(index for index in range(LAYERS) if index not in layers)
    return LayerTable.preset(LAYERS, profile=profile, softmax=softmax, **changes)


def tiny_student(
    model_type: str, profile: str = "faithful", layers: tuple[int, ...] | None = None, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """A converted model with random weights that come from no teacher; `changes` may name another mixer."""
    return tiny_mixture(model_type, tiny_table(profile, layers, **changes), seed)


def tiny_mixture(model_type: str, table: LayerTable, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A converted model with random weights and the given layer table, which may have fewer layers than `LAYERS`;
    `changes` are of the teacher's configuration."""
    if len(table) != LAYERS:
        changes["num_hidden_layers"] = len(table)
    model = model_class(model_type)(converted_config(teacher_config(model_type, **changes), table))
    randomise(model, seed)
    return model.eval()


def tiny_qwen3_5() -> PreTrainedModel:
    """A model in the format of Qwen3.5, whose value heads share queries and keys."""
    sizes = {f"linear_{part}_head_dim": 8 for part in ("key", "value")}
    counts = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    types = ["linear_attention", "full_attention"] * 2
    config = qwen3_5.DeltaNetQwen3_5TextConfig(**COMMON, **sizes, **counts, head_dim=16, layer_types=types)
    model = qwen3_5.model_class()(config)
    randomise(model, 0)
    return model.eval()
