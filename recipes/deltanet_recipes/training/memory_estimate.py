"""Estimates the peak memory of one process in a stage, within a quarter of what was measured (docs/training.md).

Weights, gradients, optimiser state and logits are counted from the tensors that the stage will have. What the backward
pass needs of the layers is estimated: the numbers that enter and leave their matrices, times one measured factor. Not
counted are CUDA's context, workspaces, fragmentation, and what an evaluation takes beside a CUDA graph. On a CPU, it is
the resident memory of the process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import nn

from deltanet_hf.model_sizes import mlp_size
from deltanet_hf.process_memory import runtime_bytes
from deltanet_recipes.schema import Align, Recipe, Stage
from deltanet_recipes.training.model_pair import decoder_layers, mixer_name, output_weight
from deltanet_recipes.training.optim import parameter_groups
from deltanet_recipes.training.runtime import Runtime

ACTIVATION_FACTOR = {True: 1.0, False: 2.0}
"""What compiled and eager layers keep for the backward pass, divided by `_layer_values`; measured."""
LOGIT_BYTES = {True: 12, False: 48}
"""Bytes per token of a chunk and word of the vocabulary, compiled and eager: logits of both models, their
log-probabilities, and the gradient; measured."""
MUON_BYTES = 10  # per weight of one shape: momentum with look-ahead, and the matrices of the iteration in bfloat16


@dataclass(frozen=True)
class Memory:
    """The parts of the peak in bytes.

    Attributes:
        weights: those of teacher and student, copies of float32 weights in bfloat16, and what FSDP2 gathers.
        gradients: of the trained weights.
        optimizer: AdamW's or Muon's state, and what an update by Muon takes beside it.
        activations: what the backward pass needs of the layers.
        logits: what one chunk of the loss takes.
        process: on a CPU, libraries and tokenizer.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    process: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def stage_memory(
    stage: Stage,
    recipe: Recipe,
    student: nn.Module,
    converted: Mapping[int, nn.Module],
    attention: int,
    rows: int,
    runtime: Runtime,
) -> Memory:
    """The estimate for one stage.

    Args:
        student: the model as the stage trains it, with adapters and `requires_grad`; only shapes and dtypes are read.
        converted: its mixers by layer index.
        attention: weights of one attention layer of the teacher.
        rows: rows that one process works on at once.
    """
    layers = decoder_layers(student)
    layerwise = isinstance(stage, Align) and stage.mode == "layerwise"
    indices = list(converted if isinstance(stage, Align) else range(len(layers)))  # of the layers that train at once
    if layerwise:
        indices = indices[:1]
    trains = [converted[index] for index in indices] if isinstance(stage, Align) else [student]
    trained = {p for module in trains for p in module.parameters() if p.requires_grad}
    recompute = recipe.engine.gradient_checkpointing and not layerwise
    shards = runtime.world if recipe.engine.sharding == "fsdp2" and not layerwise else 1

    on_cpu, width = runtime.device.type == "cpu", 2 if runtime.bf16 else 4
    whole = on_cpu or not layerwise
    teacher_layers = width * sum(
        _stored(layers[index]) + (attention - _stored(converted[index]) if index in converted else 0)
        for index in (range(len(layers)) if whole else indices)
    )
    outside = width * (_stored(student) - _stored(layers)) if whole else 0  # embeddings, output matrix, last norm
    sharded = _nbytes([student] if on_cpu else trains) + teacher_layers
    if runtime.bf16 and not recompute:
        sharded += 2 * sum(p.numel() for module in trains for p in module.parameters() if p.dtype == torch.float32)
    # FSDP2 gathers a layer into a buffer, copies it out, and gathers the next meanwhile; the rest of the student stays.
    gathered = 3 * max(_nbytes([layer]) for layer in layers) + outside if shards > 1 else 0

    tokens = rows * stage.sequence_length
    values = ACTIVATION_FACTOR[bool(runtime.compile)] * sum(_layer_values(student, index, stage) for index in indices)
    states, logits = 0, 0  # hidden states per token that are kept beside them; bytes
    if recompute:  # one layer with its gradients, and the input of each
        values, states = 2 * values / max(1, len(indices)), len(layers)
    if isinstance(stage, Align):
        states += 2 * len(indices)  # inputs and outputs of the teacher's attention
    else:
        states += len(layers) if stage.hidden_weight > 0 else 0
        each = LOGIT_BYTES[bool(runtime.compile)] + 4 * (stage.recall_weight > 0)  # of one more pass of the teacher
        logits = min(stage.loss_chunk, tokens) * output_weight(student).shape[0] * each
    hidden = int(student.config.hidden_size)  # type: ignore[union-attr, arg-type]
    return Memory(
        weights=sharded // shards + outside + gathered,
        gradients=4 * sum(p.numel() for p in trained) // shards,
        optimizer=_optimizer_bytes(student, stage, trained) // shards,
        activations=int((values + states * hidden) * tokens * width),
        logits=logits,
        process=runtime_bytes(student.config) if on_cpu else 0,  # type: ignore[arg-type]
    )


def _layer_values(student: nn.Module, index: int, stage: Stage) -> int:
    """Numbers per token that enter and leave the matrices of a layer; in alignment, of its mixer alone.

    Outputs count twice in a mixer or attention: before and after norm, convolution, rotation or activation.
    """
    layer = decoder_layers(student)[index]
    parts = layer.get_submodule(mixer_name(layer)).named_modules()
    matrices = [part for name, part in parts if isinstance(part, nn.Linear) and "lora_" not in name]
    mixing = sum(part.in_features + 2 * part.out_features for part in matrices)
    around = 3 * (int(student.config.hidden_size) + mlp_size(student.config))  # type: ignore[union-attr, arg-type]
    return mixing if isinstance(stage, Align) else mixing + around


def _optimizer_bytes(student: nn.Module, stage: Stage, trained: set[nn.Parameter]) -> int:
    """The optimiser's state: 8 bytes per weight of AdamW, 4 of Muon, which updates matrices of one shape together."""
    vectors, matrices = 0, Counter[torch.Size]()
    for group in parameter_groups(student, stage.optimizer):
        for parameter in trained.intersection(group["params"]):
            if group["muon"]:
                matrices[parameter.shape] += parameter.numel()
            else:
                vectors += parameter.numel()
    return 8 * vectors + 4 * matrices.total() + MUON_BYTES * max(matrices.values(), default=0)


def _stored(module: nn.Module) -> int:
    """The number of weights of a module without adapters; tied weights count once."""
    return sum(p.numel() for name, p in module.named_parameters() if "lora_" not in name)


def _nbytes(modules: Iterable[nn.Module]) -> int:
    return sum(p.nbytes for module in modules for p in module.parameters())
