"""`transformers` and `mlx` exports: one decoder layer at a time, into a folder that appears when it is complete."""

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
from .companions import complete_with_companions, export_note, keep_own_tokenizer
from .folder_writer import Progress, write_folder
from .model_folder import EMBEDDING, FINAL_NORM, HEAD, ConvertedModel, file_states, output_specs
from .norms import centre, divide_columns, factors_to_json, fold_factors, loses_bits
from .obstacles import NATIVE_FAMILY, family_name
from .qwen3_5_config import target_config
from .rewrite import FLOAT32_SUFFIXES, Heads, Named
from .slots import Slots, arrange, uneven_note

RECORD = "export.json"
MLX_MODEL_TYPE = "qwen3_5"
COMMON_KEYS = (  # of a text model's config and of the config around it
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
    """A checked export: what is written where, and what the norms' powers of two are."""

    model: ConvertedModel
    dtype: torch.dtype
    config: Qwen3_5TextConfig
    factors: dict[str, Tensor | None]  # norm -> what its weight is multiplied by
    rounded: dict[str, Tensor]  # norm -> its weight, where float32 cannot hold w - 1
    untied: bool
    slots: Slots
    layout: Layout
    record: dict[str, Any] = field(repr=False)

    def notes(self) -> list[str]:
        """What a user should know about this export."""
        found = []
        config, kept = self.model.config, self.model.table.softmax
        if not kept:
            found.append(
                "No layer keeps softmax attention: one idle layer of zeros is added, without which transformers' own "
                "class and mlx-lm cannot generate."
            )
        if self.untied:
            found.append("The final norm has weights below 1/2: the output head is written apart from the embedding.")
        if kept and self.slots.idle and (uneven := uneven_note(kept, config.num_hidden_layers)):
            found.append(uneven)
        if kept and self.dtype != torch.float32 and family_name(self.model.config) != NATIVE_FAMILY:
            found.append(
                "The q/k norms of the kept layers are stored in float32; a runtime that rounds them to "
                f"{str(self.dtype).removeprefix('torch.')} loses up to 2**-9 of weights below 1/2."
            )
        return found


def plan_export(
    model: ConvertedModel, dtype: torch.dtype | None, shard_size: int, style: str = "transformers"
) -> ExportPlan:
    """Reads the norms and lays the output out. The obstacles to the format `style` must have been checked."""
    model.check()
    dtype = dtype or (torch.float32 if model.dtype == torch.float64 else model.dtype)
    factors, rounded, untied = _norms(model, dtype)
    slots = arrange(model.table.softmax, model.config.num_hidden_layers, style)
    config = target_config(model.config, dtype, slots, untied=untied)
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
    """Powers of two of the norms, norms that stay rounded, and whether the output head must be written apart."""
    factors: dict[str, Tensor | None] = {}
    rounded: dict[str, Tensor] = {}
    if family_name(model.config) == NATIVE_FAMILY:
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
        # One rounding of 2**-24 is not worth a second copy of the embedding.
        rounded[FINAL_NORM], folded = final, None
    factors[FINAL_NORM] = folded
    return factors, rounded, model.tied and folded is not None


def exported_layer(plan: ExportPlan, place: int) -> Named:
    """All tensors of decoder layer `place` of the target."""
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
    """The model's layer `index` in the target's form, under its own index."""
    config: Any = plan.model.config
    read = plan.model.reader(plan.dtype)
    prefix = f"model.layers.{index}."
    native = family_name(config) == NATIVE_FAMILY
    first, second = (plan.factors.get(prefix + f"{name}_layernorm.weight") for name in ("input", "post_attention"))
    if native:
        yield from _native_attention(plan, index, read)
    elif plan.model.table[index] is not None:
        heads = converted_heads(plan.model)
        yield from rewrite.to_linear_attn(read, prefix + "self_attn.", prefix + "linear_attn.", heads, first)
    else:
        yield from rewrite.to_gated_attention(read, prefix + "self_attn.", head_size(config), first)
    yield from rewrite.to_mlp(read, prefix + "mlp.", second)
    for name, factors in (("input_layernorm.weight", first), ("post_attention_layernorm.weight", second)):
        yield prefix + name, read(prefix + name) if native else _centred(read(prefix + name), factors, plan.dtype)


def _native_attention(plan: ExportPlan, index: int, read: rewrite.Read) -> Named:
    prefix = f"model.layers.{index}."
    if plan.model.table[index] is not None:
        yield from rewrite.native_to_linear_attn(read, prefix + "linear_attn.")
        return
    for name in plan.model.checkpoint.entries:
        if name.startswith(prefix + "self_attn."):
            yield name, read(name)


def exported_ends(plan: ExportPlan) -> Named:
    """Embedding, final norm and output head."""
    read, dtype = plan.model.reader(plan.dtype), plan.dtype
    native = family_name(plan.model.config) == NATIVE_FAMILY
    factors = plan.factors.get(FINAL_NORM)
    yield EMBEDDING, read(EMBEDDING)
    yield FINAL_NORM, read(FINAL_NORM) if native else _centred(read(FINAL_NORM), factors, dtype)
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
    """Writes OUT; killed at any moment, OUT is absent (or old) or complete, and `resume` completes it.

    Args:
        style: transformers or mlx; the same weights; config and tokenizer are found differently.
    """

    def complete(folder: Path) -> None:
        with writing(folder):
            plan.config.save_pretrained(folder)
        complete_with_companions(plan.model.folder, folder, plan.model.config, export_note(style))
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
    """Whether OUT is this export already: the same record and shards, and written after the model's weights."""
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
    """mlx-lm finds its model file by `model_type`, and has one for Qwen3.5 with and without vision.

    Nested as in checkpoints with vision, the same file is right for transformers too, which would take the flat one
    for defaults.
    """
    file = folder / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    common = {key: values[key] for key in COMMON_KEYS if key in values}
    nested = {**common, "model_type": MLX_MODEL_TYPE, "text_config": values}
    write_atomically(file, (json.dumps(nested, indent=2) + "\n").encode())
