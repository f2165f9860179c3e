"""Writes exports in the formats `transformers` and `mlx`, one decoder layer at a time."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltanet_hf.model_sizes import head_size
from deltanet_hf.model_types import family_type
from deltanet_hf.safe_write import write_atomically, writing

from ..storage.safetensors_folder import read_json
from ..teacher_model import EMBEDDING, HEAD
from . import rewrite
from .companions import export_note, keep_own_tokenizer, write_companions
from .export_plan import ExportPlan
from .folder_writer import Progress, write_folder
from .model_folder import FINAL_NORM, ConvertedModel
from .norms import centre, divide_columns
from .obstacles import QWEN3_5_FAMILY
from .rewrite import Heads, Named

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
    qwen3_5 = family_type(config) == QWEN3_5_FAMILY
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
    qwen3_5 = family_type(plan.model.config) == QWEN3_5_FAMILY
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
        {"style": style, "record": plan.record, "files": plan.model.checkpoint.file_states()},
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
