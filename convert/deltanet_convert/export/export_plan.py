"""Plans an export: reads the norms, arranges the layers and lays out every tensor of the output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from deltanet_hf.model_types import family_type

from ..meta_model import meta_model
from ..storage.shard_writer import Layout, plan_layout
from ..storage.versions import versions
from ..teacher_model import output_specs
from .model_folder import FINAL_NORM, ConvertedModel
from .norms import factors_to_json, fold_factors, loses_bits
from .obstacles import QWEN3_5_FAMILY
from .qwen3_5_config import qwen3_5_config
from .rewrite import FLOAT32_SUFFIXES
from .slots import Slots, arrange, uneven_note


@dataclass(frozen=True)
class ExportPlan:
    """A checked export: its tensors and files, and the powers of two that move out of the norms."""

    model: ConvertedModel
    dtype: torch.dtype
    config: Qwen3_5TextConfig
    factors: dict[str, Tensor | None]  # norm -> the powers of two by which its weight is multiplied
    rounded: dict[str, Tensor]  # norm -> its exact weight, if float32 cannot hold w - 1
    untied: bool  # whether the output head is written although it shares the embedding's weights in the model
    slots: Slots
    layout: Layout
    record: dict[str, Any] = field(repr=False)

    def notes(self) -> list[str]:
        """Notes for the user about this export."""
        found = []
        config, kept = self.model.config, self.model.table.softmax
        if not kept:
            found.append(
                "No layer keeps softmax attention. One idle layer of zeros is added, because transformers' own class "
                "and mlx-lm cannot generate without an attention layer."
            )
        if self.untied:
            found.append(
                "The final norm has weights below 1/2, so the output head is written separately from the embedding."
            )
        if kept and self.slots.idle and (uneven := uneven_note(kept, config.num_hidden_layers)):
            found.append(uneven)
        if kept and self.dtype != torch.float32 and family_type(self.model.config) != QWEN3_5_FAMILY:
            found.append(
                "The q/k norms of the kept layers are stored in float32. A runtime that rounds them to "
                f"{str(self.dtype).removeprefix('torch.')} changes weights below 1/2 by up to 2**-9."
            )
        return found


def plan_export(model: ConvertedModel, dtype: torch.dtype | None, shard_size: int, style: str) -> ExportPlan:
    """Reads the norms and plans all tensors of the export.

    Args:
        model: a model without obstacles to the format (`refuse_obstacles`).
        dtype: dtype of the weights; None for the model's.
        shard_size: largest size of a weight file, in bytes.
        style: transformers, mlx or gguf.
    """
    model.check()
    dtype = dtype or (torch.float32 if model.dtype == torch.float64 else model.dtype)
    factors, rounded, untied = _norms(model, dtype)
    slots = arrange(model.table.softmax, model.config.num_hidden_layers, style)
    config = qwen3_5_config(model.config, dtype, slots, untied=untied)
    specs = output_specs(meta_model(Qwen3_5ForCausalLM, config, dtype), dtype, FLOAT32_SUFFIXES)
    record = {
        "source": model.config.to_dict(),
        "dtype": str(dtype).removeprefix("torch."),
        "slots": slots.sources,
        "untied": untied,
        "factors": {name: factors_to_json(value) for name, value in factors.items() if value is not None},
        "rounded": {name: value.tolist() for name, value in rounded.items()},
        "versions": versions(),
    }
    return ExportPlan(model, dtype, config, factors, rounded, untied, slots, plan_layout(specs, shard_size), record)


def _norms(model: ConvertedModel, dtype: torch.dtype) -> tuple[dict[str, Tensor | None], dict[str, Tensor], bool]:
    """Computes what happens to the norms.

    Returns:
        The powers of two per norm; the norms that are stored rounded; whether the output head, although it shares the
        embedding's weights in the model, is written separately.
    """
    factors: dict[str, Tensor | None] = {}
    rounded: dict[str, Tensor] = {}
    if family_type(model.config) == QWEN3_5_FAMILY:
        return factors, rounded, False
    read = model.reader(dtype)
    for index in range(model.config.num_hidden_layers):
        prefix = f"model.layers.{index}."
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            factors[prefix + name] = fold_factors(read(prefix + name), dtype)
        if model.table[index] is None:
            for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
                weight = read(prefix + name)
                if bool(loses_bits(weight, torch.float32).any()):
                    rounded[prefix + name] = weight
    final = read(FINAL_NORM)
    folded = fold_factors(final, dtype)
    if folded is not None and model.tied and dtype == torch.float32:
        # A rounding by 2**-24 is accepted to avoid a second copy of the embedding.
        rounded[FINAL_NORM], folded = final, None
    factors[FINAL_NORM] = folded
    return factors, rounded, model.tied and folded is not None
