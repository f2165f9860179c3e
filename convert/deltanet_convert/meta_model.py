"""Models without data: modules and shapes on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from deltanet_hf.model_types import family_type
from deltanet_hf.models.families import FAMILIES, caps_scores


def meta_model(cls: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Builds a model on the meta device: modules and shapes without data."""
    with torch.device("meta"):
        model = cls._from_config(config, dtype=dtype, attn_implementation=attention_implementation(config))
    model.config._experts_implementation = "eager"  # one expert after the other (`expert_stream.py`)
    return model.eval()  # type: ignore[no-any-return]


def attention_implementation(config: PreTrainedConfig) -> str:
    """PyTorch's own attention (SDPA); eager attention for families that cap scores or have learned sinks."""
    family = FAMILIES.get(family_type(config))  # None for Qwen3.5
    sdpa = family is None or family.model_class._supports_sdpa
    return "sdpa" if sdpa and not caps_scores(config) else "eager"


def tied_names(model: PreTrainedModel) -> set[str]:
    """Names of the parameters that share another parameter's data (the output head of a tied model)."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return set()
    keys: Any = model._tied_weights_keys or {}
    return set(keys)
