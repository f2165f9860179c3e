"""Imports Qwen3.5 text checkpoints: undoes an export of deltanet-hf, and renames the tensors of any other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from deltanet_hf.errors import UserError, one_line
from deltanet_hf.model_sizes import head_size
from deltanet_hf.model_types import family_type
from deltanet_hf.models.factory import model_class
from deltanet_hf.models.layers import LayerTable
from deltanet_hf.models.qwen3_5 import MODEL_TYPE, DeltaNetQwen3_5ForCausalLM, DeltaNetQwen3_5TextConfig
from deltanet_hf.safe_write import writing
from deltanet_hf.version import install_command

from ..meta_model import meta_model
from ..storage.safetensors_folder import Checkpoint, read_json
from ..storage.shard_writer import Layout, plan_layout
from ..teacher_model import EMBEDDING, HEAD, check_tensors, output_specs
from . import rewrite
from .companions import write_companions
from .folder_writer import Progress, write_folder
from .model_folder import FINAL_NORM, FLOAT32_KEPT, reader
from .norms import factors_from_json, multiply_columns, uncentre
from .rewrite import FLOAT32_SUFFIXES, Heads, Named, Read
from .stream_export import RECORD

TEXT_PREFIX = "model.language_model."  # prefix of the text model's tensors if there is a vision tower
IMPORTED = f"""This folder is a Qwen3.5 text model for `deltanet_hf`: the same weights under this project's names.

```python
import deltanet_hf  # {install_command()}
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("PATH")
```
"""


@dataclass(frozen=True)
class ImportPlan:
    """A checked import: where the tensors come from and what is written."""

    folder: Path
    checkpoint: Checkpoint
    config: PreTrainedConfig
    layout: Layout
    dtype: torch.dtype
    record: dict[str, Any] | None  # export.json, if the folder is an export of a converted model


def plan_import(folder: Path, dtype: torch.dtype | None, shard_size: int) -> ImportPlan:
    """Reads config, record and headers of a Qwen3.5 folder.

    Args:
        dtype: dtype of the result; None for the embedding's.
        shard_size: largest size of a weight file, in bytes.

    Raises:
        UserError: a tensor is missing or has another shape, or the config cannot be read.
    """
    file = folder / "config.json"
    raw = read_json(file)
    record = _record(folder / RECORD) if (folder / RECORD).exists() else None
    if record is not None and record["source"].get("model_type") == MODEL_TYPE:
        record = None
    checkpoint = Checkpoint.open(folder)
    embedding = next((n for n in (EMBEDDING, _beside_vision(EMBEDDING)) if n in checkpoint), None)
    if embedding is None:
        raise UserError(f"{folder}: tensor '{EMBEDDING}' is missing; give a complete Qwen3.5 text checkpoint")
    dtype = dtype or checkpoint.dtype(embedding)
    try:
        imported: PreTrainedConfig = _imported_config(raw)
        config = imported if record is None else AutoConfig.for_model(**record["source"])
    except Exception as error:
        where = file if record is None else folder / RECORD
        raise UserError(f"{where}: cannot be read ({one_line(error, 300)}); correct the key") from error
    stored = meta_model(Qwen3_5ForCausalLM, imported, dtype)
    check_tensors(file, stored, checkpoint, stored_as=partial(_name_in, checkpoint), alone=False)
    config.dtype = dtype
    made: type[PreTrainedModel] = DeltaNetQwen3_5ForCausalLM
    if record is not None:
        made = model_class(family_type(config))
    specs = output_specs(meta_model(made, config, dtype), dtype, FLOAT32_KEPT)
    return ImportPlan(folder, checkpoint, config, plan_layout(specs, shard_size), dtype, record)


def _record(file: Path) -> dict[str, Any]:
    """The data of an export, from its `export.json`; UserError if a part is missing. Early exports have no slots."""
    record = {"slots": [], **read_json(file)}
    parts = {"source": dict, "slots": list, "factors": dict, "rounded": dict}
    if not all(isinstance(record.get(key), kind) for key, kind in parts.items()):
        raise UserError(
            f"{file}: is damaged, so that the export cannot be undone; copy it again, or remove it to import the "
            "folder as a Qwen3.5 model"
        )
    return record


def _imported_config(raw: dict[str, Any]) -> DeltaNetQwen3_5TextConfig:
    values = dict(raw.get("text_config", raw))
    if raw.get("tie_word_embeddings") is not None:
        values["tie_word_embeddings"] = raw["tie_word_embeddings"]
    imported = Qwen3_5TextConfig(**{**values, "model_type": "qwen3_5_text"}).to_dict()
    for key in ("model_type", "architectures", "auto_map", "transformers_version"):
        imported.pop(key, None)
    return DeltaNetQwen3_5TextConfig(**imported, architectures=[DeltaNetQwen3_5ForCausalLM.__name__])


def write_import(plan: ImportPlan, out: Path, *, resume: bool, overwrite: bool, progress: Progress) -> None:
    """Writes the folder OUT through `publish_folder`, as an export does."""

    def complete(folder: Path) -> None:
        with writing(folder):
            plan.config.save_pretrained(folder)
        write_companions(plan.folder, folder, plan.config, IMPORTED)

    layer, ends = (_renamed_layer, _renamed_ends) if plan.record is None else (_restored_layer, _restored_ends)
    layers = [(f"layer {i}", partial(layer, plan, i)) for i in range(plan.config.num_hidden_layers)]
    dtype = str(plan.dtype)
    write_folder(
        out,
        {"import": plan.config.to_dict(), "dtype": dtype, "files": plan.checkpoint.file_states()},
        plan.layout,
        [("ends", partial(ends, plan)), *layers],
        complete,
        resume=resume,
        overwrite=overwrite,
        progress=progress,
        what="import",
    )


def _reader(plan: ImportPlan) -> Read:
    # Norms of exports are rounded once 1 has been added.
    float32 = FLOAT32_SUFFIXES if plan.record is None else (*FLOAT32_SUFFIXES, "layernorm.weight", FINAL_NORM)
    read: Callable[[str], Tensor] = reader(plan.checkpoint, plan.dtype, float32)

    places = {} if plan.record is None else _places(plan.record["slots"])

    def read_text_model(name: str) -> Tensor:
        parts = name.split(".")
        if name.startswith("model.layers."):
            parts[2] = places.get(parts[2], parts[2])
        return read(_name_in(plan.checkpoint, ".".join(parts)))

    return read_text_model


def _places(sources: list[int | None]) -> dict[str, str]:
    """Maps each layer of the model to its place in the export; both as strings."""
    return {str(layer): str(place) for place, layer in enumerate(sources) if layer is not None}


def _name_in(checkpoint: Checkpoint, name: str) -> str:
    return name if name in checkpoint else _beside_vision(name)


def _beside_vision(name: str) -> str:
    return name.replace("model.", TEXT_PREFIX, 1)


def _renamed_layer(plan: ImportPlan, index: int) -> Named:
    config: Any = plan.config
    read, prefix = _reader(plan), f"model.layers.{index}."
    linear = LayerTable.of(config)[index] is not None
    if linear:
        rows = config.linear_num_key_heads * config.linear_key_head_dim
        yield from rewrite.rename_from_qwen3_5(read, prefix + "linear_attn.", rows)
    for name in plan.layout.specs:
        if name.startswith(prefix) and not name.startswith(prefix + "linear_attn."):
            yield name, read(name)


def _renamed_ends(plan: ImportPlan) -> Named:
    read = _reader(plan)
    for name in (EMBEDDING, FINAL_NORM, HEAD):
        if name in plan.layout.specs:
            yield name, read(name)


def _factors(plan: ImportPlan, norm: str) -> Tensor | None:
    assert plan.record is not None
    found = plan.record["factors"].get(norm)
    return None if found is None else factors_from_json(found, int(plan.config.hidden_size))


def _weight(plan: ImportPlan, read: Read, norm: str) -> Tensor:
    """Restores a norm's weight to its value before the export."""
    assert plan.record is not None
    if norm in plan.record["rounded"]:
        return torch.tensor(plan.record["rounded"][norm])
    return uncentre(read(norm), _factors(plan, norm), plan.dtype)


def _restored_layer(plan: ImportPlan, index: int) -> Named:
    config: Any = plan.config
    read, prefix = _reader(plan), f"model.layers.{index}."
    first, second = prefix + "input_layernorm.weight", prefix + "post_attention_layernorm.weight"
    attention, factors = prefix + "self_attn.", _factors(plan, first)
    if (kind := LayerTable.of(config)[index]) is not None:
        states = config.num_attention_heads if kind.settings.expand_kv else config.num_key_value_heads
        heads = Heads(config.num_attention_heads, states, head_size(config))
        yield from rewrite.from_linear_attn(read, prefix + "linear_attn.", attention, heads, factors)
    else:
        tensors = rewrite.from_gated_attention(read, attention, head_size(config), factors, plan.dtype)
        for name, tensor in tensors:
            yield name, _weight(plan, read, name) if name.endswith("_norm.weight") else tensor
    yield from rewrite.from_mlp(read, prefix + "mlp.", _factors(plan, second))
    for norm in (first, second):
        yield norm, _weight(plan, read, norm)


def _restored_ends(plan: ImportPlan) -> Named:
    read = _reader(plan)
    yield EMBEDDING, read(EMBEDDING)
    yield FINAL_NORM, _weight(plan, read, FINAL_NORM)
    if HEAD in plan.layout.specs:
        yield HEAD, multiply_columns(read(HEAD), _factors(plan, FINAL_NORM))
