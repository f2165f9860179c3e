"""The config of a hybrid whose kept softmax layers get q/k norms, so that it can be exported.

Qwen3.5, the architecture of exports, has only softmax attention with an RMSNorm on q and k. A hybrid of a family
without these norms is therefore written as a converted Qwen3 model. `norm_fit.py` fits the norms of its kept layers so
that they change the attention as little as possible.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedConfig, Qwen3Config

from deltanet_hf.model_sizes import head_size
from deltanet_hf.models.layers import INSERTED_QK_NORMS

# Keys that the configs of all families and of Qwen3.5 share.
DECODER_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "tie_word_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
# Families whose decoder layer equals Qwen3's except for the norms (and Qwen2's biases, which `norm_fit.py` folds).
WITHOUT_NORMS = ("llama", "mistral", "qwen2")
CARRIED = (*DECODER_KEYS, "num_hidden_layers", "rope_parameters", "attention_dropout")


def needs_norms(teacher: PreTrainedConfig, kept: Iterable[int]) -> bool:
    """Whether layers that keep the teacher's attention need q/k norms before they can be exported."""
    return teacher.model_type in WITHOUT_NORMS and any(True for _ in kept)


def with_norms(teacher: PreTrainedConfig, kept: Iterable[int]) -> Qwen3Config:
    """The teacher's config as a Qwen3 config, with the list of `kept` layers under the key `INSERTED_QK_NORMS`."""
    values: dict[str, Any] = {name: getattr(teacher, name) for name in CARRIED}
    values |= {"head_dim": head_size(teacher), INSERTED_QK_NORMS: sorted(kept)}
    return Qwen3Config(**values)
