"""Estimates what each stage takes: peak memory of a process, within a quarter of what was measured (docs/training.md),
floating-point operations per token, and files.

Weights, gradients, optimiser state and logits are counted from the tensors that a stage will have, on a copy of the
student without memory. What the backward pass needs of the layers is estimated: the numbers that enter and leave their
matrices, times one measured factor, and on a CPU the scores of attention in blocks. Not counted are CUDA's context,
workspaces, fragmentation, and what an evaluation takes beside a CUDA graph. On a CPU, it is the resident memory of the
process.

Operations are counted from sizes too. A product with a matrix of n weights is 2 n operations per token. In rows of L
tokens, causal softmax attention of H heads of d takes 2 L H d (scores and values, each 2 H d over L / 2 tokens on
average), and a recurrent state of n numbers takes 6 n: it is read for the prediction, written, and read for the output.
With the weights of

    T    the teacher's layers and output matrix,        A_T  its attention,
    S    the student's layers and output matrix,        A_S  its attention and states,
    M    what is trained (mixers, adapters, or all),    X    the adapters,

one token of distillation takes

    teacher forward      2 T + A_T
    student forward      2 S + 2 X + A_S
    student backward     2 S + 2 X + 2 M + 2 A_S        (gradients of activations, and of the weights that are trained)

and one of joint alignment 2 T + A_T without the output matrix, and 4 M + 3 A_S for the mixers alone, whose gradients
with respect to activations are not counted. Layerwise alignment has no teacher in its steps. Embeddings, norms,
convolutions and activations computed again (`gradient_checkpointing`) are not counted, so the share of a chip's peak
that follows is that of the useful work ("model FLOPs utilization", Chowdhery et al. 2022, PaLM, appendix B).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from deltanet_hf.mixers.attention.family_attention import kind_of
from deltanet_hf.mixers.attention.window_softmax import blocks_pay
from deltanet_hf.mixers.layer.layer_kind import branches_of
from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_hf.model_sizes import head_size, mlp_size
from deltanet_hf.process_memory import runtime_bytes
from deltanet_kernels.common.sizes import cdiv
from deltanet_kernels.window.cpu import block_size
from deltanet_recipes.schema import Align, Stage, stage_tokens
from deltanet_recipes.training.adapters import merge_lora, train_for
from deltanet_recipes.training.feeds import micro_batch_rows
from deltanet_recipes.training.model_pair import decoder_layers, mixer_name, mixers
from deltanet_recipes.training.optim import parameter_groups
from deltanet_recipes.training.runtime import Runtime

ACTIVATION_FACTOR = {True: 1.0, False: 2.0}
"""Numbers that compiled and eager layers keep for the backward pass, by those that pass their matrices; measured."""
LOGIT_BYTES = {True: 12, False: 40}
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


@dataclass(frozen=True)
class Flops:
    """Operations per training token by part of the step; those of layerwise alignment are of all mixers."""

    teacher: float
    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.teacher + self.forward + self.backward


class Estimate(NamedTuple):
    """The estimate of a stage.

    Attributes:
        rows: rows that one process works on at once.
        in_mixers, rest: numbers of trained weights of mixers, and of others.
        peak: parts of the peak memory of one process.
        disk: bytes of the teacher's activations that all processes together keep on disk.
    """

    rows: int
    in_mixers: int
    rest: int
    peak: Memory
    flops: Flops
    disk: int


def estimates(
    stages: Sequence[Stage], student: PreTrainedModel, runtime: Runtime, holdout_tokens: int
) -> list[Estimate]:
    """Estimates of consecutive stages.

    Args:
        student: the model before the first of the stages; only shapes and dtypes are read.
        holdout_tokens: tokens that are evaluated on.
    """
    sizes, found = _Sizes.of(student), []
    for stage, model in zip(stages, _as_trained(student, stages), strict=True):
        rows, disk = micro_batch_rows(stage, runtime.world), 0
        if stage.layerwise:
            # Hidden states, attention inputs and attention outputs, which every process keeps for itself.
            values = 3 * sizes.hidden * (stage_tokens(stage) + holdout_tokens)
            disk = (2 if runtime.bf16 else 4) * values * runtime.world
        trained = {p for p in model.parameters() if p.requires_grad}
        adapters = {p for name, p in model.named_parameters() if p.requires_grad and "lora_" in name}
        new = {p for mixer in mixers(model).values() for part in mixer.new_parts() for p in part.parameters()}
        in_mixers, total = _numbers(trained & new - adapters), _numbers(trained)
        flops = _flops(stage, sizes, total, _numbers(adapters))
        peak = _stage_memory(stage, sizes, student, model, rows, runtime)
        found.append(Estimate(rows, in_mixers, total - in_mixers, peak, flops, disk))
    return found


def _as_trained(student: PreTrainedModel, stages: Sequence[Stage]) -> Iterator[PreTrainedModel]:
    """A copy of the student without memory, prepared for one stage after the other as it will be when that runs."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in student.parameters()}
    model: PreTrainedModel = deepcopy(student, empty)  # type: ignore[arg-type]
    for stage in stages:
        with torch.device("meta"):  # adapters take no memory either
            train_for(model, stage, seed=0)
        yield model
        merge_lora(model)


def _stage_memory(
    stage: Stage, sizes: _Sizes, student: PreTrainedModel, model: PreTrainedModel, rows: int, runtime: Runtime
) -> Memory:
    """The peak of a process that works on `rows` rows at once, with the student before all stages and as `model`."""
    converted, blocks = list(mixers(model).values()), list(decoder_layers(student))
    places = [i for i, layer in enumerate(sizes.layers) if layer.converted or not isinstance(stage, Align)]
    places = places[:1] if stage.layerwise else places  # of the layers that train at once
    modules: list[nn.Module] = [model]  # that train at once
    if isinstance(stage, Align):
        modules = converted[:1] if stage.layerwise else converted
    at_once = {p for module in modules for p in module.parameters()}
    adamw, muon = 0, Counter[torch.Size]()
    for group in parameter_groups(model, stage.optimizer):
        for p in at_once.intersection(group["params"]):
            if group["muon"]:
                muon[p.shape] += p.numel()
            else:
                adamw += p.numel()

    recompute = runtime.engine.gradient_checkpointing and not stage.layerwise
    shards = runtime.world if runtime.engine.sharding == "fsdp2" and not stage.layerwise else 1
    on_cpu, width = runtime.device.type == "cpu", 2 if runtime.bf16 else 4
    whole = on_cpu or not stage.layerwise
    outside = width * sizes.outside if whole else 0
    sharded = _bytes(model.parameters()) if on_cpu else _bytes(at_once)
    sharded += width * sum(sizes.layers[i].teacher for i in (range(len(blocks)) if whole else places))
    if runtime.bf16 and not recompute:
        sharded += 2 * _numbers(p for p in at_once if p.dtype == torch.float32)
    # FSDP2 gathers a layer into a buffer, copies it out, and gathers the next meanwhile; the rest of the student stays.
    largest = max(_bytes(layer.parameters()) for layer in decoder_layers(model))
    gathered = 3 * largest + outside if shards > 1 else 0

    length, tokens = stage.sequence_length, rows * stage.sequence_length
    around = 0 if isinstance(stage, Align) else 3 * (sizes.hidden + sizes.mlp)
    values = ACTIVATION_FACTOR[bool(runtime.compile)] * sum(sizes.layers[i].passed + around for i in places)
    if on_cpu:
        bits = 16 if isinstance(stage, Align) else stage.cache_bits
        values += sum(_kept_scores(blocks[i], length, bits) for i in places)
    states, logits = 0, 0  # hidden states per token that are kept beside them; bytes
    if recompute:  # one layer with its gradients, and the input of each
        values, states = 2 * values / max(1, len(places)), len(blocks)
    if isinstance(stage, Align):
        states += 2 * len(places)  # inputs and outputs of the teacher's attention
    else:
        states += len(blocks) if stage.hidden_weight > 0 else 0
        logits = min(stage.loss_chunk, tokens) * sizes.vocabulary * LOGIT_BYTES[bool(runtime.compile)]
    of_muon = 4 * muon.total() + MUON_BYTES * max(muon.values(), default=0)  # an update takes all of one shape together
    return Memory(
        weights=sharded // shards + outside + gathered,
        gradients=4 * (adamw + muon.total()) // shards,
        optimizer=(8 * adamw + of_muon) // shards,
        activations=int((values + states * sizes.hidden) * tokens * width),
        logits=logits,
        process=runtime_bytes(sizes.vocabulary) if on_cpu else 0,
    )


def _kept_scores(layer: Any, tokens: int, bits: int) -> float:
    """Numbers per token of rows of `tokens` tokens that a decoder layer's attention in blocks
    (`deltanet_kernels.window.cpu`) keeps for the backward pass on a CPU: its scores, before and after the softmax.

    Other forms keep no scores.

    Args:
        bits: of earlier keys and values.
    """
    kept = 0.0
    for branch in branches_of(layer.self_attn).values() if hasattr(layer, "self_attn") else ():
        kind = kind_of(branch)
        if kind.new_parts() and not kind.has_state:
            continue
        for part, _ in kind.softmax_parts:
            of_family = None if kind.has_state else sliding_window(part.config, part.layer_idx)
            window = min(size for size in (kind.window_tokens, of_family, tokens) if size is not None)
            if bits == 16 and not kind.has_state and not blocks_pay(window, tokens):
                continue
            heads = part.heads if kind.has_state else part.config.num_attention_heads
            block = block_size(window, tokens, flash=False)
            count = cdiv(tokens, block)
            kept += 2 * heads * count * block * (block + (window - 1 if count > 1 else 0)) / tokens
    return kept


def _flops(stage: Stage, sizes: _Sizes, trained: int, adapters: int) -> Flops:
    """Operations of a stage that trains so many weights, adapters among them."""
    layers, converted = sizes.layers, [layer for layer in sizes.layers if layer.converted]
    softmax = 2.0 * stage.sequence_length * sizes.queries  # of one layer
    mixing = 6.0 * sum(layer.states for layer in converted)
    own, in_mixers = sum(layer.matrices for layer in layers), sum(layer.in_mixer for layer in layers)
    teacher = 2.0 * (own - in_mixers + len(converted) * sizes.attention) + len(layers) * softmax
    if isinstance(stage, Align):
        forward = 2.0 * in_mixers + mixing
        return Flops(0.0 if stage.layerwise else teacher, forward, forward + mixing)
    head = sizes.vocabulary * sizes.hidden
    mixed = mixing + (len(layers) - len(converted)) * softmax
    through = 2.0 * (own + head + adapters)
    return Flops(teacher + 2.0 * head, through + mixed, through + 2.0 * trained + 2 * mixed)


class _Layer(NamedTuple):
    """Sizes of a decoder layer. `in_mixer` and `states` are 0 unless it is converted."""

    converted: bool  # it has a mixer with weights that the teacher does not have
    teacher: int  # weights of the teacher's layer
    matrices: int  # weights of the matrices that a token meets; of experts, those that it uses
    in_mixer: int  # those of the mixer
    states: int  # numbers of the mixer's recurrent states, without those of convolutions
    passed: int
    """Numbers per token that enter and leave the matrices of the mixer or attention. Outputs count twice: before and
    after norm, convolution, rotation or activation."""

    @classmethod
    def of(cls, layer: nn.Module, mixer: Any, attention: int, used_experts: int) -> _Layer:
        name, weights = mixer_name(layer), _numbers(layer.parameters())
        linear = [part for part in layer.get_submodule(name).modules() if isinstance(part, nn.Linear)]
        experts = [w for key, w in layer.named_parameters() if w.dim() == 3 and not key.startswith(name)]
        parts = [] if mixer is None else [part for part in mixer.new_parts() if hasattr(part, "recurrent_shapes")]
        states = [torch.Size(state.shape) for part in parts for state in part.recurrent_shapes().values()]
        return cls(
            converted=mixer is not None,
            teacher=weights + (0 if mixer is None else attention - _numbers(mixer.parameters())),
            matrices=_matrices(layer) + used_experts * sum(w.numel() // len(w) for w in experts),
            in_mixer=0 if mixer is None else _matrices(mixer),
            states=sum(shape.numel() for shape in states if len(shape) == 3),
            passed=sum(part.in_features + 2 * part.out_features for part in linear),
        )


class _Sizes(NamedTuple):
    """Sizes of a student and its teacher."""

    layers: list[_Layer]
    hidden: int
    mlp: int  # width of the feed-forward block for one token
    queries: int  # width of the queries of all heads of the teacher's attention
    attention: int  # weights of the projections of one attention layer of the teacher
    outside: int  # weights outside of the layers: embeddings, output matrix, last norm
    vocabulary: int  # rows of the output matrix

    @classmethod
    def of(cls, student: PreTrainedModel) -> _Sizes:
        """Only shapes are read, so the student may be on the meta device."""
        config: Any = student.config
        queries, keys = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        attention = 2 * config.hidden_size * head_size(config) * (queries + keys)
        layers, converted = decoder_layers(student), mixers(student)
        used = int(getattr(config, "num_experts_per_tok", 0))
        return cls(
            [_Layer.of(layer, converted.get(i), attention, used) for i, layer in enumerate(layers)],
            hidden=config.hidden_size,
            mlp=mlp_size(config),
            queries=queries * head_size(config),
            attention=attention,
            outside=_numbers(student.parameters()) - _numbers(layers.parameters()),
            vocabulary=student.get_output_embeddings().weight.shape[0],
        )


def _numbers(weights: Any) -> int:
    return sum(p.numel() for p in weights)


def _bytes(weights: Any) -> int:
    return sum(p.nbytes for p in weights)


def _matrices(module: nn.Module) -> int:
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))
