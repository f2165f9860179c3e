"""Estimates the peak memory of one process in a stage, from the shapes of the tensors.

The peak is the backward pass of one micro-batch, beside weights and optimiser state, or an update by Muon. Counts of
activations are those of compiled layers; what a value of the loss takes was measured (`LOGIT_BYTES`). Not counted is
what stays below a few hundred MiB: CUDA's context, workspaces of matrix products, fragmentation.

On a CPU, the estimate is that of the resident memory: layers are not compiled (`cpu_memory.py`), both models are in the
same memory as a whole, and the libraries count. Not counted are the mapped files of layerwise alignment, whose pages
the operating system writes back where memory is short.

Sizes are in bytes. D is the hidden size, M that of the MLP, H heads of d in attention (and in a mixer with a state per
query head).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from deltanet_hf.model_sizes import head_size, mlp_size
from deltanet_recipes.schema import Align, DistilBase, Recipe, Stage
from deltanet_recipes.training import cpu_memory
from deltanet_recipes.training.adapters import adapter_weights, mixers_in_full, stage_targets
from deltanet_recipes.training.feeds import micro_batch_rows
from deltanet_recipes.training.flops import attention_weights
from deltanet_recipes.training.layer_runner import DOCUMENT_TOKENS
from deltanet_recipes.training.model_pair import decoder_layers, mixers, output_weight
from deltanet_recipes.training.optim import SMALL
from deltanet_recipes.training.runtime import Runtime

LOGIT_BYTES = {True: 12, False: 48}
"""Bytes per token of a chunk and word of the vocabulary, compiled and eager: logits of both models, their
log-probabilities, and the gradient. Compiled, it follows from runs on an H200 (tests/recipes/test_recipe_memory.py)."""
CHUNK = 64  # tokens per chunk of the operators
MUON_BYTES = 10  # per weight of one shape: momentum with look-ahead, and the matrices of the iteration in bfloat16


@dataclass(frozen=True)
class Memory:
    """The parts of the peak in bytes.

    Attributes:
        weights: those of teacher and student as they are stored, and copies of float32 weights in bfloat16.
        gradients: of the trained weights.
        optimizer: AdamW's or Muon's state, and what an update by Muon takes beside it.
        activations: what the backward pass needs of the layers.
        logits: what one chunk of the loss takes.
        gathered: with FSDP2, the unsharded weights and gradients of the layers at work.
        evaluation: with CUDA graphs, whose memory stays their own, what the evaluation takes beside it.
        process: on a CPU, libraries and tokenizer.
        loading: on a CPU, what reading the teacher takes beyond all of these: its files are mapped meanwhile.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    gathered: int = 0
    evaluation: int = 0
    process: int = 0
    loading: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def expected_memory(stage: Stage, recipe: Recipe, student: nn.Module, runtime: Runtime, trained: int) -> Memory:
    """Estimate one stage.

    Args:
        student: the converted model as it is loaded before the first stage; only shapes are read.
        trained: number of trained weights.
    """
    found = _on_device(stage, recipe, student, runtime, trained)
    if runtime.device.type != "cpu":
        return found
    width = 2 if runtime.bf16 else 4
    teacher = _size(student) - _size(*mixers(student).values()) + len(mixers(student)) * attention_weights(student)
    stored_width = output_weight(student).element_size()
    loaded = stored_width * _size(student)
    weights = found.weights
    if isinstance(stage, Align):
        weights = loaded + width * teacher + _trained_bytes(trained, width) - stored_width * trained
    found = replace(found, weights=weights, process=cpu_memory.process_bytes(student))
    stored = 2 * teacher if width == 4 else 0  # weights that are read as they are stored are the mapped ones
    reading = found.process + loaded + width * teacher + stored
    return replace(found, loading=max(0, reading - found.total))


def _on_device(stage: Stage, recipe: Recipe, student: nn.Module, runtime: Runtime, trained: int) -> Memory:
    """The parts that lie on the device that trains."""
    width, on_cpu = 2 if runtime.bf16 else 4, runtime.device.type == "cpu"
    layers, converted = decoder_layers(student), mixers(student)
    micro = micro_batch_rows(stage, runtime.world) * stage.sequence_length
    in_mixers = _size(*converted.values())
    teacher_layers = _size(layers) - in_mixers + len(converted) * attention_weights(student)
    outside = _size(student) - _size(layers)  # embeddings, output matrix, last norm
    recompute = recipe.engine.gradient_checkpointing
    hidden = int(student.config.hidden_size)  # type: ignore[union-attr, arg-type]
    chunks = _chunks_per_token(recipe, stage.sequence_length)
    in_mixer = {index: _mixer_values(student, mixer, chunks) for index, mixer in converted.items()}
    per_mixer = max(in_mixer.values(), default=0) * micro * width
    if on_cpu and converted:  # beside what a mixer saves, the error of its output
        saved = max(cpu_memory.mixer_values(student, mixer, stage.sequence_length) for mixer in converted.values())
        per_mixer = (saved + hidden) * micro * width
    at_work = per_mixer if on_cpu else 0  # gradients of the values of the mixer at work, as many as it saved
    if isinstance(stage, Align) and stage.mode == "layerwise":
        one = trained // max(1, len(converted))
        largest = max(_size(layer) for layer in layers)
        given = 2 * hidden * width * stage.batch_tokens // runtime.world
        return Memory(
            weights=width * largest + _trained_bytes(one, width),
            gradients=4 * one,
            optimizer=_optimizer_bytes(stage, one, [next(iter(converted.values()))] if converted else []),
            activations=per_mixer + at_work + given,
        )
    sharded = recipe.engine.sharding == "fsdp2"
    shards = runtime.world if sharded else 1
    if isinstance(stage, Align):
        kept = len(converted)
        given = 2 * hidden * micro * width * kept
        return Memory(
            weights=(width * teacher_layers + _trained_bytes(trained, width)) // shards + width * outside,
            gradients=4 * trained // shards,
            optimizer=_optimizer_bytes(stage, trained, list(converted.values())) // shards,
            activations=given + per_mixer * (1 if recompute else kept) + at_work,
            gathered=_gathered(layers, converted, width) if sharded else 0,
            evaluation=(given + per_mixer) * runtime.cuda_graphs,
        )
    before = _trained_before(stage, recipe, student)
    copies = 2 * (before + trained) if width == 2 else 0
    if recompute:
        copies //= len(layers)
    frozen = max(0, _size(student) - before - _replaced(stage, student, trained))
    own = output_weight(student).element_size() * frozen + 4 * (before + trained) + copies
    counted = [
        cpu_memory.layer_values(student, index, stage.sequence_length)
        if on_cpu
        else _layer_values(student, converted.get(index), in_mixer.get(index))
        for index in range(len(layers))
    ]
    activations = sum(counted) * micro * width
    if recompute:
        activations = 2 * activations // len(layers) + len(layers) * hidden * micro * width
    if stage.hidden_weight > 0:
        # the teacher's states, and in layers that are not compiled their differences from the student's
        activations += (2 if on_cpu else 1) * len(layers) * hidden * micro * width
    windowed = stage.recall_weight > 0  # the logits of one more pass of the teacher
    values = min(stage.loss_chunk, micro) * output_weight(student).shape[0]
    in_full: list[nn.Module] = [layers] if stage.train == "full" else mixers_in_full(student, stage)
    adapters = adapter_weights(student, stage) if stage.lora_rank > SMALL else 0
    logits = values * (LOGIT_BYTES[bool(runtime.compile)] + 4 * windowed)
    return Memory(
        weights=(own + width * teacher_layers) // shards + width * outside,
        gradients=4 * trained // shards,
        optimizer=_optimizer_bytes(stage, trained, in_full, adapters) // shards,
        activations=activations,
        logits=logits,
        gathered=_gathered(layers, converted, width) + width * outside if sharded else 0,
        evaluation=logits // 2 * runtime.cuda_graphs,
    )


def _trained_bytes(weights: int, width: int) -> int:
    """Float32 weights, and their copies in the dtype of the arithmetic."""
    return weights * (4 if width == 4 else 6)


def _optimizer_bytes(stage: Stage, trained: int, in_full: list[nn.Module], adapters: int = 0) -> int:
    """The optimiser's state: 8 bytes per weight of AdamW, 4 of Muon, which updates all matrices of one shape at once.

    Args:
        in_full: the modules whose weights are trained themselves.
        adapters: weights of adapters that are matrices to Muon.
    """
    if stage.optimizer.name == "adamw":
        return 8 * trained
    groups: dict[tuple[int, ...], int] = {}
    for part in {part for module in in_full for part in module.modules() if isinstance(part, nn.Linear)}:
        shape = tuple(part.weight.shape)
        if min(shape) > SMALL:
            groups[shape] = groups.get(shape, 0) + part.weight.numel()
    matrices = sum(groups.values()) + adapters
    return 4 * matrices + 8 * (trained - matrices) + MUON_BYTES * max(groups.values(), default=0)


def _trained_before(stage: DistilBase, recipe: Recipe, student: nn.Module) -> int:
    """Weights that this stage freezes, but that an earlier stage left in float32, because it merged adapters."""
    modules = dict(student.named_modules())
    merged: set[str] = set()
    for earlier in recipe.stages:
        if earlier == stage:
            break
        if isinstance(earlier, DistilBase) and earlier.train == "lora":
            merged.update(stage_targets(student, earlier))
    if stage.train == "full":
        return 0
    return sum(modules[name].weight.numel() for name in merged)  # type: ignore[union-attr, misc]


def _replaced(stage: DistilBase, student: nn.Module, trained: int) -> int:
    """How many of the trained weights are not adapters, which the student does not have yet."""
    return trained - adapter_weights(student, stage)


def _chunks_per_token(recipe: Recipe, row: int) -> float:
    """Chunks of 64 tokens for which the operators make room, per token: one more behind each document."""
    return 1 / CHUNK + (1 / DOCUMENT_TOKENS[0] + 1 / row) * recipe.data.isolate_documents


def _mixer_values(student: nn.Module, mixer: nn.Module, chunks: float) -> int:
    """Values per token that the backward pass of a mixer of H heads of d and S states needs.

    2 D + 10 H d: its input and output, and per head q, k and v before and after their activations, the gate, the output
    before and after the norm, and the values of the chunks. Per chunk: the scores of every head and the inverse of
    every state, 64 x 64, and every state, d x d.

    Args:
        chunks: number of chunks per token.
    """
    config: Any = student.config
    heads, dim = config.num_attention_heads, head_size(config)
    states = getattr(mixer, "num_states", heads)
    per_chunk = CHUNK * CHUNK * (heads + states) + dim * dim * states
    return int(2 * config.hidden_size + 10 * heads * dim + chunks * per_chunk)


def _layer_values(student: nn.Module, mixer: nn.Module | None, in_mixer: int | None) -> int:
    """Values per token that the backward pass of a decoder layer needs.

    3 D + 3 M for residual stream, norms and MLP; beside that, those of the mixer, or of attention (2 H d, keys and
    values, and its input). A window beside a state has the inputs of the state, so that its output (H d) is added.
    """
    config: Any = student.config
    heads, dim = config.num_attention_heads, head_size(config)
    mixing = in_mixer
    if mixing is None:
        mixing = 2 * dim * (heads + (config.num_key_value_heads or heads)) + config.hidden_size
    elif getattr(mixer, "window_branch", None) is not None:
        mixing += heads * dim
    return int(3 * config.hidden_size + 3 * mlp_size(config) + mixing)


def _gathered(layers: nn.ModuleList, converted: dict[int, nn.Module], width: int) -> int:
    """The largest layer, which FSDP2 gathers into a buffer, copies out, and gathers for the next layer meanwhile.

    Its gradients in float32 are there twice, before and in the buffer that is reduced.
    """
    largest = max(range(len(layers)), key=lambda index: _size(layers[index]))
    mixer = _size(converted[largest]) if largest in converted else 0
    layer = width * (_size(layers[largest]) - mixer) + 4 * mixer
    return 3 * layer + 2 * 4 * mixer


def _size(*modules: nn.Module) -> int:
    """The number of parameters of the modules; tied parameters count once."""
    return sum(p.numel() for p in {p for module in modules for p in module.parameters()})
