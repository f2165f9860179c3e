"""Opens and checks a converted model's folder: its config, its options and its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from deltanet_hf.errors import UserError, one_line
from deltanet_hf.mixers.gated_deltanet import GatedDeltaNet
from deltanet_hf.model_types import PREFIX, family_type
from deltanet_hf.models.factory import model_class
from deltanet_hf.models.families import FAMILIES
from deltanet_hf.models.layers import LayerTable
from deltanet_hf.models.qwen3_5 import DeltaNetQwen3_5ForCausalLM

from ..meta_model import meta_model
from ..storage.safetensors_folder import Checkpoint, read_json
from ..teacher_model import EMBEDDING, check_tensors

FINAL_NORM = "model.norm.weight"
FLOAT32_KEPT = GatedDeltaNet.fp32  # suffixes of the parameters that a converted model of any dtype has in float32


@dataclass(frozen=True)
class ConvertedModel:
    """The folder of a model that `deltanet-hf convert` or a training run wrote."""

    folder: Path
    config: PreTrainedConfig
    table: LayerTable
    checkpoint: Checkpoint

    @classmethod
    def open(cls, folder: Path) -> ConvertedModel:
        """Reads the config and all headers; UserError if the model is not a converted one or is incomplete."""
        config = read_converted_config(folder)
        return cls(folder, config, LayerTable.of(config), Checkpoint.open(folder))

    def check(self) -> None:
        """Raises UserError unless names and shapes of the weights are those that the config describes."""
        family = family_type(self.config)
        made = model_class(family) if family in FAMILIES else DeltaNetQwen3_5ForCausalLM
        model = meta_model(made, self.config, self.dtype)
        check_tensors(self.folder / "config.json", model, self.checkpoint)

    @property
    def dtype(self) -> torch.dtype:
        return self.checkpoint.dtype(EMBEDDING) if EMBEDDING in self.checkpoint else torch.float32

    @property
    def tied(self) -> bool:
        return bool(self.config.tie_word_embeddings)

    def reader(self, dtype: torch.dtype) -> Any:
        return reader(self.checkpoint, dtype, FLOAT32_KEPT)


def read_converted_config(folder: Path) -> PreTrainedConfig:
    """Reads the config of a converted model's folder; UserError if it is not a converted model."""
    file = folder / "config.json"
    model_type = read_json(file).get("model_type")
    if not isinstance(model_type, str) or not model_type.startswith(PREFIX):
        raise UserError(
            f"{file}: model_type {model_type!r} is not a converted model; run `deltanet-hf convert --profile qwen3_5` "
            "first (with --dry-run it only prints whether the result could be exported)"
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"{file}: transformers cannot read it ({one_line(error, 300)}); correct the key") from error


def reader(checkpoint: Checkpoint, dtype: torch.dtype, float32: tuple[str, ...]) -> Any:
    """Returns `read(name)`: one tensor in `dtype`, or in float32 if its name ends with one of `float32`."""

    def read(name: str) -> Tensor:
        if name not in checkpoint:
            raise UserError(f"{checkpoint.folder}: tensor '{name}' is missing; complete the checkpoint")
        return checkpoint.read(name, torch.float32 if name.endswith(float32) else dtype)

    return read
