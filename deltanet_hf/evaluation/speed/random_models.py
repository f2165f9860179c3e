"""Models with random weights and the shapes of well-known ones, whose speed can be measured without a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from deltanet_hf.decoding.served import serve
from deltanet_hf.mixers import recommended
from deltanet_hf.models.cache_bits import set_cache_bits
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


PLANNED = (
    *(225, 417, 417, 577, 577, 577, 577, 833, 577, 577, 577, 417, 225, 129, 833),
    *(833, 417, 577, 257, 833, 1665, 833, 833, 577, 1185, 129, 833, 257, 833, 577),
)
"""The windows of the plan for SmolLM2-135M, by layer."""
PLANNED_WITH_STATES = (
    *(161, 321, 321, 481, 481, 481, 481, 737, 481, 481, 481, 321, 161, 65, 737),
    *(737, 321, 481, 193, 737, 1569, 737, 737, 513, 1089, 65, 737, 161, 737, 481),
)
"""Those of the plan of as many bytes in which each of its layers with windows has states, too."""


class Layout(NamedTuple):
    """The layers of a converted Llama model: its mixer, and the softmax layers or heads that stay."""

    mixer: str = ""  # a name in `MIXER_NAMES`, with its recommended settings; nothing for a softmax model
    layers: int = 0  # every which layer stays softmax; 0 for none
    heads: int = 0  # every which key/value head does, counted through all layers
    cache_bits: int = 16
    windows: tuple[int, ...] = ()  # of the parts that the layers are divided into evenly; nothing for the mixer's own
    served: bool = True  # in the fast form, if it has one; else as transformers runs it


KINDS: dict[str, Layout] = {
    "transformers": Layout(served=False),
    "teacher": Layout(),
    "teacher4bit": Layout(cache_bits=4),
    "all": Layout("gated_deltanet"),
    "hybrid25": Layout("gated_deltanet", layers=4),
    "window25": Layout("gated_deltanet+window", layers=4),
    "window25_4bit": Layout("gated_deltanet+window", layers=4, cache_bits=4),
    "windows4bit": Layout("window", layers=4, cache_bits=4),
    "heads10": Layout("window", heads=10, cache_bits=4),
    "by_layer": Layout("window", heads=10, cache_bits=4, windows=PLANNED),  # by `convert --mixer window`
    "states_by_layer": Layout("gated_deltanet+window", heads=10, cache_bits=4, windows=PLANNED_WITH_STATES),
}


def random_model(
    shape: str, kind: str, dtype: torch.dtype, device: torch.device, mixer: str = "gated_deltanet"
) -> PreTrainedModel:
    """A Llama model in eval mode.

    Args:
        shape: a name in `SHAPES`.
        kind: a name in `KINDS`.
        mixer: takes the place of gated_deltanet.
    """
    config = random_config(shape, kind, mixer)
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if not KINDS[kind].mixer:
        set_cache_bits(model, KINDS[kind].cache_bits)
    return serve(model.eval()) if KINDS[kind].served else model.eval()


def random_config(shape: str, kind: str, mixer: str = "gated_deltanet") -> Any:
    """The configuration of a `random_model`; that of a softmax model says nothing of its bits."""
    config: Any = LlamaConfig(**SHAPES[shape], max_position_embeddings=131072)
    layout = KINDS[kind]
    layout = layout._replace(mixer=layout.mixer.replace("gated_deltanet", mixer))
    return converted_config(config, _table(layout, config)) if layout.mixer else config


def _table(layout: Layout, config: Any) -> LayerTable:
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    if not layout.heads:
        softmax = range(layout.layers - 1, layers, layout.layers) if layout.layers else ()
        table = LayerTable.preset(layers, layout.mixer, softmax=softmax, teacher=config)
    else:
        kept = {divmod(index, heads) for index in range(layout.heads // 2, layers * heads, layout.heads)}
        table = LayerTable.by_heads(*recommended(layout.mixer, teacher=config), layers, heads, kept)
    if layout.windows:
        table = table.with_windows([layout.windows[len(layout.windows) * i // layers] for i in range(layers)])
    return replace(table, cache_bits=layout.cache_bits, key_order=layout.cache_bits == 4)
