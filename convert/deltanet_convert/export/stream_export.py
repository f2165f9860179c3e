"""Writes exports in the formats `transformers` and `mlx`, one decoder layer at a time."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from deltanet_hf.safe_write import write_atomically, writing

from ..decoder_config import head_size
from ..storage.safetensors_folder import read_json
from ..storage.shard_writer import Layout, plan_layout
from ..storage.versions import versions
from ..teacher_model import meta_model
from . import rewrite
from .companions import export_note, keep_own_tokenizer, write_companions
from .folder_writer import Progress, write_folder
from .model_folder import EMBEDDING, FINAL_NORM, HEAD, ConvertedModel, file_states, output_specs
from .norms import centre, divide_columns, factors_to_json, fold_factors, loses_bits
from .obstacles import QWEN3_5_FAMILY, family_name
from .qwen3_5_config import qwen3_5_config
from .rewrite import FLOAT32_SUFFIXES, Heads, Named
from .slots import Slots, arrange, uneven_note

RECORD = "export.json"
MLX_MODEL_TYPE = "qwen3_5"
COMMON_KEYS = (  # keys that a nested config has both inside and outside `text_config`
    "architectures",
    "dtype",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "transformers_version",
)


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
        if kept and self.dtype != torch.float32 and family_name(self.model.config) != QWEN3_5_FAMILY:
            found.append(
                "The q/k norms of the kept layers are stored in float32. A runtime that rounds them to "
                f"{str(self.dtype).removeprefix('torch.')} changes weights below 1/2 by up to 2**-9."
            )
        return found


def plan_export(
    model: ConvertedModel, dtype: torch.dtype | None, shard_size: int, style: str = "transformers"
) -> ExportPlan:
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
    if family_name(model.config) == QWEN3_5_FAMILY:
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


def exported_layer(plan: ExportPlan, place: int) -> Named:
    """Yields all tensors of decoder layer `place` of the export."""
    prefix, source = f"model.layers.{place}.", plan.slots.sources[place]
    if source is None:
        for name, spec in plan.layout.specs.items():
            if name.startswith(prefix):
                yield name, torch.zeros(spec.shape)
        return
    own = f"model.layers.{source}."
    for name, tensor in _rewritten_layer(plan, source):
        yield prefix + name.removeprefix(own), tensor


def _rewritten_layer(plan: ExportPlan, index: int) -> Named:
    """Yields the model's layer `index` with Qwen3.5's tensors, named by the model's index."""
    config: Any = plan.model.config
    read = plan.model.reader(plan.dtype)
    prefix = f"model.layers.{index}."
    qwen3_5 = family_name(config) == QWEN3_5_FAMILY
    first, second = (plan.factors.get(prefix + f"{name}_layernorm.weight") for name in ("input", "post_attention"))
    if qwen3_5:
        yield from _renamed_attention(plan, index, read)
    elif plan.model.table[index] is not None:
        heads = converted_heads(plan.model)
        yield from rewrite.to_linear_attn(read, prefix + "self_attn.", prefix + "linear_attn.", heads, first)
    else:
        yield from rewrite.to_gated_attention(read, prefix + "self_attn.", head_size(config), first)
    yield from rewrite.to_mlp(read, prefix + "mlp.", second)
    for name, factors in (("input_layernorm.weight", first), ("post_attention_layernorm.weight", second)):
        yield prefix + name, read(prefix + name) if qwen3_5 else _centred(read(prefix + name), factors, plan.dtype)


def _renamed_attention(plan: ExportPlan, index: int, read: rewrite.Read) -> Named:
    prefix = f"model.layers.{index}."
    if plan.model.table[index] is not None:
        yield from rewrite.rename_to_qwen3_5(read, prefix + "linear_attn.")
        return
    for name in plan.model.checkpoint.entries:
        if name.startswith(prefix + "self_attn."):
            yield name, read(name)


def exported_ends(plan: ExportPlan) -> Named:
    """Yields embedding, final norm and output head."""
    read, dtype = plan.model.reader(plan.dtype), plan.dtype
    qwen3_5 = family_name(plan.model.config) == QWEN3_5_FAMILY
    factors = plan.factors.get(FINAL_NORM)
    yield EMBEDDING, read(EMBEDDING)
    yield FINAL_NORM, read(FINAL_NORM) if qwen3_5 else _centred(read(FINAL_NORM), factors, dtype)
    if HEAD in plan.layout.specs:
        source = EMBEDDING if plan.model.tied else HEAD
        yield HEAD, divide_columns(read(source), factors, source)


def _centred(weight: Tensor, factors: Tensor | None, dtype: torch.dtype) -> Tensor:
    return centre(weight if factors is None else weight * factors, dtype)


def converted_heads(model: ConvertedModel) -> Heads:
    config: Any = model.config
    states = config.num_attention_heads if model.table.only_kind.settings.expand_kv else config.num_key_value_heads
    return Heads(config.num_attention_heads, states, head_size(config))


def write_export(plan: ExportPlan, out: Path, style: str, *, resume: bool, overwrite: bool, progress: Progress) -> None:
    """Writes the folder OUT through `publish_folder`: at any moment, OUT is absent, old or complete.

    Args:
        style: transformers or mlx. The weights are the same; config.json and the tokenizer's files differ.
    """

    def complete(folder: Path) -> None:
        with writing(folder):
            plan.config.save_pretrained(folder)
        write_companions(plan.model.folder, folder, plan.model.config, export_note(style))
        if style == "mlx":
            name_for_mlx(folder)
            keep_own_tokenizer(plan.model.folder, folder)
        write_atomically(folder / RECORD, (json.dumps(plan.record) + "\n").encode())

    layers = [(f"layer {i}", partial(exported_layer, plan, i)) for i in range(plan.config.num_hidden_layers)]
    write_folder(
        out,
        {"style": style, "record": plan.record, "files": file_states(plan.model.checkpoint)},
        plan.layout,
        [("ends", partial(exported_ends, plan)), *layers],
        complete,
        resume=resume,
        overwrite=overwrite,
        progress=progress,
        finished=partial(_finished, plan, out, style),
    )


def _finished(plan: ExportPlan, out: Path, style: str) -> bool:
    """Whether OUT is this export already: same record, same shards, and newer than the model's weights."""
    shards = {out / shard.file_name: shard.size for shard in plan.layout.shards}
    there = set(out.glob("*.safetensors"))
    if there != set(shards) or not (out / RECORD).exists() or read_json(out / RECORD) != _as_json(plan.record):
        return False
    written = min(file.stat().st_mtime_ns for file in there)
    mlx = read_json(out / "config.json").get("model_type") == MLX_MODEL_TYPE
    return (
        mlx == (style == "mlx")
        and all(file.stat().st_size == size for file, size in shards.items())
        and all(file.stat().st_mtime_ns < written for file in plan.model.checkpoint.files())
    )


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def name_for_mlx(folder: Path) -> None:
    """Nests the text model's config as in checkpoints with a vision tower.

    mlx-lm finds its model class by `model_type` and has a single one for Qwen3.5 with and without vision, named after
    the nested config. transformers reads the nested file too; from a flat file of that model_type it would take
    default values.
    """
    file = folder / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    common = {key: values[key] for key in COMMON_KEYS if key in values}
    nested = {**common, "model_type": MLX_MODEL_TYPE, "text_config": values}
    write_atomically(file, (json.dumps(nested, indent=2) + "\n").encode())
