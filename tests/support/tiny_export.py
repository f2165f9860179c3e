"""Tiny converted models with random weights, saved for export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from deltanet_convert.export.export_plan import ExportPlan, plan_export
from deltanet_convert.export.model_folder import ConvertedModel
from deltanet_convert.export.stream_export import write_export
from deltanet_hf import LayerTable, converted_config
from deltanet_hf.models.factory import model_class
from deltanet_hf.models.families import FAMILIES
from support.tiny_conversion import tiny_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
ROTARY: dict[str, dict[str, Any]] = {  # scaled rotary embeddings whose effect is large within a hundred tokens
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
}
EVERY_OTHER = (0, 2)  # of four layers: 1 and 3 keep softmax


def randomise(model: torch.nn.Module, seed: int = 0, scale: float = 0.2) -> None:
    """Sets random weights; norm weights are from 0.2 to 2.7, which zero-centred bfloat16 cannot represent exactly."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(torch.empty(parameter.shape).uniform_(0.2, 2.7, generator=generator))
            elif name.endswith(("A_log", "dt_bias")):
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * (0.5 if "conv1d" in name else scale))


def exportable_table(
    layers: tuple[int, ...], changes: dict[str, Any] | None = None, num_layers: int = SIZES["num_hidden_layers"]
) -> LayerTable:
    """The layer table of the exportable profile, with `changes` of its settings; `layers` are converted."""
    softmax = tuple(index for index in range(num_layers) if index not in layers)
    return LayerTable.preset(num_layers, **{"profile": "qwen3_5", "softmax": softmax, **(changes or {})})


def exportable_model(
    model_type: str, layers: tuple[int, ...] = (0, 1, 2, 3), wiring: dict[str, Any] | None = None, **changes: Any
) -> PreTrainedModel:
    """A converted model in the exportable profile, float32, in eval mode; `wiring` changes settings of its layers."""
    config_class: Any = FAMILIES[model_type].config_class
    sizes = {**SIZES, **changes}
    config = converted_config(config_class(**sizes), exportable_table(layers, wiring, sizes["num_hidden_layers"]))
    model = model_class(model_type)(config)
    randomise(model)
    return model.eval()


def saved(model: PreTrainedModel, folder: Path) -> Path:
    """Saves the model with a tokenizer and returns the folder."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def planned(
    folder: Path, dtype: torch.dtype | None = None, shard_size: int = 10**9, style: str = "transformers"
) -> ExportPlan:
    return plan_export(ConvertedModel.open(folder), dtype, shard_size, style)


def exported(folder: Path, out: Path, style: str = "transformers", **options: Any) -> Path:
    """Exports `folder` to `out` and returns `out`."""
    run = {"resume": False, "overwrite": False, "progress": lambda done, total: None}
    write_export(planned(folder, style=style, **options), out, style, **run)  # type: ignore[arg-type]
    return out
