"""Plans a conversion from shapes alone: only file headers are read, and nothing is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from deltanet_hf.errors import UserError
from deltanet_hf.mixers import FLOAT32_NAMES
from deltanet_hf.mixers.attention.family_attention import kind_of
from deltanet_hf.mixers.cache.quantised_cache_spec import tokens_before
from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_hf.models.cache_bits import layer_bytes, use_cache_bits
from deltanet_hf.models.factory import converted_config, model_class
from deltanet_hf.models.far_positions import FarPositions
from deltanet_hf.models.layers import INSERTED_QK_NORMS, SOFTMAX, LayerTable
from deltanet_kernels.packed_cache.layout import takes_key_order

from .calibration_text import sequence_length
from .memory_estimate import conversion_memory
from .meta_model import meta_model
from .start.norm_config import needs_norms, with_norms
from .storage.shard_writer import Layout, TensorSpec, plan_layout
from .teacher_model import Teacher, output_specs
from .weight_origins import count_origins

CONTEXTS = (2048, 4096, 16384, 32768, 65536, 131072)  # of the cache table, as far as the teacher has positions
SMALL_FILES_BYTES = 64 * 2**20  # tokenizer, card, plot


@dataclass(frozen=True)
class LayerPlan:
    """The plan of one decoder layer; the counts are numbers of parameters, of the output unless stated otherwise."""

    index: int
    kind: str  # name of its kind in the layer table
    title: str  # name of its mixer for people; "softmax" where attention stays
    normed: bool  # whether a layer that stays softmax gets q/k norms, which the teacher does not have
    window: int | None  # sliding window of the teacher's attention, in tokens
    copied: int  # taken over from the teacher unchanged
    expanded: int  # taken over in another shape: key/value heads repeated, fused projections split
    created: int  # not in the teacher
    dropped: int  # parameters of the teacher that the converted layer does not have
    nbytes: int  # bytes of the weights
    state_bytes: int  # bytes of one sequence's state, at any length; packed, with the tokens that are not packed
    kv_bytes_per_token: int  # bytes per token of the teacher's keys and values
    kept_kv_bytes_per_token: int  # bytes per token of the keys and values that the converted model keeps
    packed: bool  # whether those have fewer than 16 bits, and come in groups

    @property
    def converted(self) -> bool:
        return self.kind != SOFTMAX

    def kv_bytes(self, context: int) -> int:
        """Bytes of the teacher's cache of this layer for one sequence of `context` tokens."""
        return self.kv_bytes_per_token * kept_tokens(context, self.window, packed=False)

    def cache_bytes(self, context: int) -> int:
        """Bytes of the converted model's cache of this layer for one sequence of `context` tokens."""
        return self.state_bytes + self.kept_kv_bytes_per_token * kept_tokens(context, self.window, self.packed)


def kept_tokens(tokens: int, window: int | None, packed: bool) -> int:
    """The tokens of a sequence whose bytes grow with it, given the family's own window."""
    return tokens_before(tokens) if packed else min(tokens, window or tokens)


@dataclass(frozen=True)
class Plan:
    """The plan of a conversion."""

    layers: tuple[LayerPlan, ...]
    teacher_parameters: int
    parameters: int
    nbytes: int  # of the shards
    shards: int
    sequence_length: int  # tokens per calibration sequence, at most
    peak_memory_bytes: int  # estimate
    disk_bytes: int  # including the working copies of activations
    cache_bytes: list[dict[str, int]]  # of one sequence, by context length: the teacher's and the converted model's
    config: PreTrainedConfig
    student: PreTrainedModel  # on the meta device
    layout: Layout

    @property
    def cache_bits(self) -> int:
        """Bits of the keys and values in the converted model's cache; the teacher's have 16."""
        return LayerTable.of(self.config).cache_bits

    @property
    def positions(self) -> FarPositions | None:
        """Those of a converted model that reads further than the teacher."""
        return LayerTable.of(self.config).positions

    def to_json(self) -> dict[str, Any]:
        """Everything that `print_plan` shows, as numbers (bytes, parameters, tokens)."""
        return {
            "layers": [asdict(layer) for layer in self.layers],
            "converted_layers": [layer.index for layer in self.layers if layer.converted],
            "teacher_parameters": self.teacher_parameters,
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "shards": self.shards,
            "peak_memory_bytes": self.peak_memory_bytes,
            "disk_bytes": self.disk_bytes,
            "cache_bits": self.cache_bits,
            "cache_bytes": self.cache_bytes,
            "positions": None if self.positions is None else asdict(self.positions),
        }


def make_plan(
    teacher: Teacher,
    table: LayerTable,
    dtype: torch.dtype,
    shard_size: int,
    calibration_tokens: int,
    insert_norms: bool = False,
) -> Plan:
    """Plans the conversion of `teacher` into the layers of `table`, stored in `dtype`.

    Args:
        insert_norms: give the kept layers q/k norms where the teacher has none (`norm_config.py`).
    """
    if table.key_order and not takes_key_order(teacher.head_dim):
        raise UserError(
            f"--cache-bits 4: got heads of {teacher.head_dim} channels, needs 8, 16, 24 or a multiple of 32; use 16"
        )
    kept = table.softmax
    inserted = insert_norms and needs_norms(teacher.config, kept)
    base = with_norms(teacher.config, kept) if inserted else teacher.config
    config = converted_config(base, table)
    config.dtype = dtype
    student_class = model_class(base.model_type)
    student = meta_model(student_class, config, dtype)  # refuses layers that have no packed form
    specs = output_specs(student, dtype, tuple(f".{name}" for name in FLOAT32_NAMES))
    layout = plan_layout(specs, shard_size)
    use_cache_bits(student, 16)  # layers are fitted in 16 bits
    layers = tuple(_layer_plan(teacher, student, table, specs, dtype, i) for i in range(teacher.num_layers))
    row = sequence_length(table, teacher.config)
    normed = getattr(config, INSERTED_QK_NORMS, ())
    modules: Any = student.model.layers
    attentions = [
        module.self_attn if table[index] is not None or index in normed else None
        for index, module in enumerate(modules)
    ]
    memory = conversion_memory(teacher, attentions, row, calibration_tokens)
    positions = int(config.max_position_embeddings)
    return Plan(
        layers=layers,
        teacher_parameters=sum(p.numel() for p in teacher.model.parameters()),
        parameters=sum(spec.numel for spec in specs if spec.dtype.is_floating_point),
        nbytes=layout.nbytes,
        shards=len(layout.shards),
        sequence_length=row,
        peak_memory_bytes=memory.peak,
        disk_bytes=layout.nbytes + 2 * memory.between + SMALL_FILES_BYTES,
        cache_bytes=[
            {
                "context": context,
                "teacher": sum(layer.kv_bytes(context) for layer in layers),
                "converted": sum(layer.cache_bytes(context) for layer in layers),
            }
            for context in sorted({min(context, positions) for context in CONTEXTS})
        ],
        config=config,
        student=student,
        layout=layout,
    )


def cache_bytes(attention: Any, head_dim: int, dtype: torch.dtype, bits: int) -> tuple[int, int]:
    """Bytes of one sequence in the cache of a layer: at any length, and per token that is kept.

    Args:
        attention: of the layer, the family's own or a `LayerKind`.
        head_dim: channels of a head.
    """
    if bits < 16:
        fixed = layer_bytes(attention, dtype, 1, bits)
        return fixed, (layer_bytes(attention, dtype, CONTEXTS[0], bits) - fixed) // tokens_before(CONTEXTS[0])
    kind = kind_of(attention)
    numbers = 2 * head_dim + kind.extra_channels(dtype)
    return kind.state_bytes(dtype), kind.growing_heads * numbers * dtype.itemsize


def _layer_plan(
    teacher: Teacher,
    student: PreTrainedModel,
    table: LayerTable,
    specs: Sequence[TensorSpec],
    dtype: torch.dtype,
    index: int,
) -> LayerPlan:
    prefix = f"model.layers.{index}."
    before = {n.removeprefix(prefix): t for n, t in teacher.model.state_dict().items() if n.startswith(prefix)}
    mine = {spec.name.removeprefix(prefix): spec for spec in specs if spec.name.startswith(prefix)}
    weights = {name: spec.shape for name, spec in mine.items() if spec.dtype.is_floating_point}
    replaced = table[index]
    attention: Any = student.model.layers[index].self_attn
    teacher_attention: Any = teacher.model.model.layers[index].self_attn
    config = teacher.config
    head_dim = int(teacher_attention.head_dim)
    fixed, per_token = cache_bytes(attention, head_dim, dtype, table.cache_bits)
    return LayerPlan(
        index=index,
        kind=table.layers[index],
        title="softmax" if replaced is None else attention.full_title,
        normed=index in getattr(student.config, INSERTED_QK_NORMS, ()),
        window=sliding_window(config, index),
        **count_origins(before, weights, teacher_attention, attention),
        nbytes=sum(spec.nbytes for spec in mine.values()),
        state_bytes=fixed,
        kv_bytes_per_token=cache_bytes(teacher_attention, head_dim, dtype, 16)[1],
        kept_kv_bytes_per_token=per_token,
        packed=table.cache_bits < 16,
    )
