"""A tiny teacher in which one key/value head of one layer looks far and nothing else depends on the context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from deltanet_hf.models.families import FAMILIES
from support.tiny_conversion import tiny_tokenizer
from support.tiny_models import teacher_config

FAR_LAYER, FAR_HEAD = 2, 1
HIDDEN, HEADS, KV_HEADS = 128, 4, 2
GAIN = 40.0
MARKERS = range(30, 62)  # token ids that the far head passes on: capital letters and digits


def far_teacher(model_type: str = "llama", **changes: Any) -> PreTrainedModel:
    """Embeddings are one-hot. The far head averages the marker tokens of its context into the logits."""
    shape = {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": 512,
        "attention_bias": False,
        "tie_word_embeddings": True,
    }
    model = FAMILIES[model_type].model_class(teacher_config(model_type, **{**shape, **changes})).eval()
    size = HIDDEN // HEADS
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        embedding = model.get_input_embeddings().weight
        embedding.copy_(torch.eye(*embedding.shape))
        attention: Any = model.model.layers[FAR_LAYER].self_attn
        for place, marker in enumerate(MARKERS):
            attention.v_proj.weight[FAR_HEAD * size + place, marker] = 1.0
            for query_head in range(FAR_HEAD * HEADS // KV_HEADS, (FAR_HEAD + 1) * HEADS // KV_HEADS):
                attention.o_proj.weight[marker, query_head * size + place] = GAIN
    return model


def far_folder(path: Path, model_type: str = "llama", **changes: Any) -> Path:
    """Saves the far teacher with a tokenizer."""
    far_teacher(model_type, **changes).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path
