"""Estimates the peak memory of a process in a stage, within a quarter of what was measured (docs/research/training.md).

Weights, gradients, optimiser state and logits are counted from the tensors that the stage will have. What the backward
pass needs of the layers is estimated: the numbers that enter and leave their matrices, times one measured factor, and
on a CPU the scores of attention in blocks. Not counted are CUDA's context, workspaces, fragmentation, and what an
evaluation takes beside a CUDA graph. On a CPU, it is the resident memory of the process.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from deltanet_hf.process_memory import runtime_bytes
from deltanet_recipes.schema import Align, Stage
from deltanet_recipes.training.runtime import Runtime
from deltanet_recipes.training.sizes import ModelSizes, StageSizes

ACTIVATION_FACTOR = {True: 1.0, False: 2.0}
"""Numbers that compiled and eager layers keep for the backward pass, by those that pass their matrices; measured."""
LOGIT_BYTES = {True: 12, False: 48}
"""Bytes per token of a chunk and word of the vocabulary, compiled and eager: logits of both models, their
log-probabilities, and the gradient; measured."""
LESS_MEMORY = "lower micro_batch_rows or loss_chunk, or set engine.gradient_checkpointing=true"
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


def stage_memory(stage: Stage, models: ModelSizes, sizes: StageSizes, rows: int, runtime: Runtime) -> Memory:
    """The estimate for one stage, in which a process works on `rows` rows at once."""
    layers = models.layers
    training = [layer for layer in layers if layer.converted] if isinstance(stage, Align) else layers  # at once
    if stage.layerwise:
        training = training[:1]
    recompute = runtime.engine.gradient_checkpointing and not stage.layerwise
    shards = runtime.world if runtime.engine.sharding == "fsdp2" and not stage.layerwise else 1

    on_cpu, width = runtime.device.type == "cpu", 2 if runtime.bf16 else 4
    whole = on_cpu or not stage.layerwise
    outside = width * models.outside if whole else 0
    sharded = sizes.student if on_cpu else sizes.at_once
    sharded += width * sum(layer.teacher for layer in (layers if whole else training))
    if runtime.bf16 and not recompute:
        sharded += 2 * sizes.float32
    # FSDP2 gathers a layer into a buffer, copies it out, and gathers the next meanwhile; the rest of the student stays.
    gathered = 3 * sizes.largest_layer + outside if shards > 1 else 0

    tokens = rows * stage.sequence_length
    around = 0 if isinstance(stage, Align) else 3 * (models.hidden + models.mlp)
    values = ACTIVATION_FACTOR[bool(runtime.compile)] * sum(layer.passed + around for layer in training)
    if on_cpu:
        length, bits = stage.sequence_length, 16 if isinstance(stage, Align) else stage.cache_bits
        values += sum(part.kept_scores(length, bits) for layer in training for part in layer.softmax)
    states, logits = 0, 0  # hidden states per token that are kept beside them; bytes
    if recompute:  # one layer with its gradients, and the input of each
        values, states = 2 * values / max(1, len(training)), len(layers)
    if isinstance(stage, Align):
        states += 2 * len(training)  # inputs and outputs of the teacher's attention
    else:
        states += len(layers) if stage.hidden_weight > 0 else 0
        each = LOGIT_BYTES[bool(runtime.compile)] + 4 * (stage.recall_weight > 0)  # of one more pass of the teacher
        logits = min(stage.loss_chunk, tokens) * models.vocabulary * each
    return Memory(
        weights=sharded // shards + outside + gathered,
        gradients=4 * (sizes.adamw + sizes.muon) // shards,
        optimizer=(8 * sizes.adamw + 4 * sizes.muon + MUON_BYTES * sizes.muon_together) // shards,
        activations=int((values + states * models.hidden) * tokens * width),
        logits=logits,
        process=runtime_bytes(models.vocabulary) if on_cpu else 0,
    )
