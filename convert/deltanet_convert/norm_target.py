"""Kept softmax layers for export: Llama's kind of attention as Qwen3's, which has an RMSNorm on q and k.

The export's target knows softmax attention with q/k norms only. A hybrid of a family without them is therefore written
as a converted Qwen3 model, whose kept layers get norms that `norm_fit.py` makes as neutral as it can.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedConfig, Qwen3Config

# The same decoder layer as Qwen3's but for the norms (and Qwen2's biases, which `norm_fit.py` folds).
WITHOUT_NORMS = ("llama", "mistral", "qwen2")
INSERTED = "inserted_qk_norms"  # key of config.json: the kept layers whose norms are not the teacher's
CARRIED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "tie_word_embeddings",
    "rope_parameters",
    "attention_dropout",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)


def needs_norms(teacher: PreTrainedConfig, kept: Iterable[int]) -> bool:
    """Whether layers that keep the teacher's attention need q/k norms before they can be exported."""
    return teacher.model_type in WITHOUT_NORMS and any(True for _ in kept)


def with_norms(teacher: PreTrainedConfig, kept: Iterable[int]) -> Qwen3Config:
    """The teacher's config as Qwen3's, with the key `INSERTED`."""
    values: dict[str, Any] = {name: getattr(teacher, name) for name in CARRIED}
    head_dim = getattr(teacher, "head_dim", None) or teacher.hidden_size // teacher.num_attention_heads
    return Qwen3Config(**values, **{"head_dim": head_dim, INSERTED: sorted(kept)})
