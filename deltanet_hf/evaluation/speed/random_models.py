"""Models with random weights and the shapes of well-known ones, whose speed can be measured without a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from deltanet_hf.decoding.served import serve
from deltanet_hf.models.factory import converted_config
from deltanet_hf.models.layers import LayerTable

SHAPES: dict[str, dict[str, Any]] = {
    "135M": {  # SmolLM2-135M
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "1B": {  # Llama 3.2 1B
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "8B": {  # Llama 3.1 8B
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}
KINDS: dict[str, int | None] = {"teacher": None, "all": 0, "hybrid25": 4}
"""Every which layer is softmax: 0 for none; None for a model that is not converted."""


def random_model(shape: str, kind: str, mixer: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A Llama model in eval mode.

    Args:
        shape: a name in `SHAPES`.
        kind: a name in `KINDS`.
        mixer: of the converted layers, a name in `MIXER_NAMES`, with its recommended settings.
    """
    config: Any = LlamaConfig(**SHAPES[shape], max_position_embeddings=131072)
    every = KINDS[kind]
    if every is not None:
        layers = config.num_hidden_layers
        softmax = range(every - 1, layers, every) if every else ()
        config = converted_config(config, LayerTable.preset(layers, mixer, softmax=softmax, teacher=config))
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return serve(model.eval())
