"""Kept softmax layers for export: Llama's kind of attention as Qwen3's, which has an RMSNorm on q and k.

The export's target knows softmax attention with q/k norms only. A hybrid of a family without them is therefore written
as a converted Qwen3 model, whose kept layers get norms that `norm_fit.py` makes as neutral as it can.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedConfig, Qwen3Config

from deltanet_hf.models.layers import INSERTED_QK_NORMS

from ..decoder_config import DECODER_KEYS, head_size

# The same decoder layer as Qwen3's but for the norms (and Qwen2's biases, which `norm_fit.py` folds).
WITHOUT_NORMS = ("llama", "mistral", "qwen2")
CARRIED = (*DECODER_KEYS, "num_hidden_layers", "rope_parameters", "attention_dropout")


def needs_norms(teacher: PreTrainedConfig, kept: Iterable[int]) -> bool:
    """Whether layers that keep the teacher's attention need q/k norms before they can be exported."""
    return teacher.model_type in WITHOUT_NORMS and any(True for _ in kept)


def with_norms(teacher: PreTrainedConfig, kept: Iterable[int]) -> Qwen3Config:
    """The teacher's config as Qwen3's, with the key `INSERTED_QK_NORMS`."""
    values: dict[str, Any] = {name: getattr(teacher, name) for name in CARRIED}
    values |= {"head_dim": head_size(teacher), INSERTED_QK_NORMS: sorted(kept)}
    return Qwen3Config(**values)
