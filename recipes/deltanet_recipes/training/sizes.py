"""Sizes of a student and of what its stages train: from them, the memory and time of a stage follow by arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from deltanet_hf.mixers.attention.family_attention import kind_of
from deltanet_hf.mixers.attention.window_softmax import blocks_pay
from deltanet_hf.mixers.layer.layer_kind import branches_of
from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_hf.model_sizes import head_size, mlp_size
from deltanet_kernels.common.sizes import cdiv
from deltanet_kernels.window.cpu import block_size
from deltanet_recipes.schema import Align, Stage
from deltanet_recipes.training.adapters import merge_lora, train_for
from deltanet_recipes.training.model_pair import decoder_layers, mixer_name, mixers, output_weight
from deltanet_recipes.training.optim import parameter_groups


@dataclass(frozen=True)
class SoftmaxSizes:
    """Sizes of softmax attention, of all heads of a layer or some.

    Attributes:
        heads: query heads.
        window: the most recent tokens that a query sees; None for all.
        with_state: whether its output is mixed with that of a recurrent state.
    """

    heads: int
    window: int | None
    with_state: bool

    def kept_scores(self, tokens: int, bits: int) -> float:
        """Numbers per token of rows of `tokens` tokens that attention in blocks (`deltanet_kernels.window.cpu`) keeps
        for the backward pass on a CPU: its scores, before and after the softmax. Other forms keep no scores.

        Args:
            bits: of earlier keys and values.
        """
        window = min(self.window or tokens, tokens)
        if bits == 16 and not self.with_state and not blocks_pay(window, tokens):
            return 0.0
        block = block_size(window, tokens, flash=False)
        count = cdiv(tokens, block)
        keys = block + (window - 1 if count > 1 else 0)
        return 2 * self.heads * count * block * keys / tokens


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a decoder layer.

    Attributes:
        converted: whether it has a mixer with weights that the teacher does not have.
        teacher: weights of the teacher's layer.
        matrices: weights of the matrices that a token meets; of experts, those that it uses.
        in_mixer: those of the mixer, 0 unless converted.
        states: numbers of the mixer's recurrent states, without those of convolutions; 0 unless converted.
        passed: numbers per token that enter and leave the matrices of the mixer or attention. Outputs count twice:
            before and after norm, convolution, rotation or activation.
        softmax: its softmax attention, with windows beside states.
    """

    converted: bool
    teacher: int
    matrices: int
    in_mixer: int
    states: int
    passed: int
    softmax: tuple[SoftmaxSizes, ...]


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a student and its teacher.

    Attributes:
        layers: from the first to the last.
        hidden, mlp: width of the residual stream, and of the feed-forward block for one token.
        queries: width of the queries of all heads of the teacher's attention.
        attention: weights of the projections of one attention layer of the teacher.
        outside: weights outside of the layers: embeddings, output matrix, last norm.
        vocabulary: rows of the output matrix.
    """

    layers: tuple[LayerSizes, ...]
    hidden: int
    mlp: int
    queries: int
    attention: int
    outside: int
    vocabulary: int

    @classmethod
    def of(cls, student: PreTrainedModel) -> ModelSizes:
        """Only shapes are read, so the student may be on the meta device."""
        config: Any = student.config
        dim, heads = head_size(config), config.num_attention_heads
        attention = 2 * config.hidden_size * dim * (heads + (config.num_key_value_heads or heads))
        layers, converted = decoder_layers(student), mixers(student)
        used = int(getattr(config, "num_experts_per_tok", 0))
        return cls(
            tuple(_layer_sizes(layer, converted.get(i), attention, used) for i, layer in enumerate(layers)),
            hidden=config.hidden_size,
            mlp=mlp_size(config),
            queries=heads * dim,
            attention=attention,
            outside=_numel(student) - _numel(layers),
            vocabulary=output_weight(student).shape[0],
        )


def _layer_sizes(layer: nn.Module, mixer: Any, attention: int, used_experts: int) -> LayerSizes:
    name = mixer_name(layer)
    linear = [part for part in layer.get_submodule(name).modules() if isinstance(part, nn.Linear)]
    experts = [w for key, w in layer.named_parameters() if w.dim() == 3 and not key.startswith(name)]
    parts = [] if mixer is None else [part for part in mixer.new_parts() if hasattr(part, "recurrent_shapes")]
    states = [torch.Size(state.shape) for part in parts for state in part.recurrent_shapes().values()]
    return LayerSizes(
        converted=mixer is not None,
        teacher=_numel(layer) + (0 if mixer is None else attention - _numel(mixer)),
        matrices=_matrices(layer) + used_experts * sum(w.numel() // len(w) for w in experts),
        in_mixer=0 if mixer is None else _matrices(mixer),
        states=sum(shape.numel() for shape in states if len(shape) == 3),
        passed=sum(part.in_features + 2 * part.out_features for part in linear),
        softmax=tuple(_softmax_sizes(layer.self_attn)) if name == "self_attn" else (),
    )


def _softmax_sizes(attention: Any) -> Iterator[SoftmaxSizes]:
    for branch in branches_of(attention).values():
        kind = kind_of(branch)
        if kind.has_state:
            for beside, _ in kind.softmax_parts:
                yield SoftmaxSizes(beside.heads, beside.window, with_state=True)
        elif not kind.new_parts():
            of_family = sliding_window(branch.config, branch.layer_idx)
            sizes = [size for size in (kind.window_tokens, of_family) if size is not None]
            yield SoftmaxSizes(branch.config.num_attention_heads, min(sizes, default=None), with_state=False)


@dataclass(frozen=True)
class StageSizes:
    """Sizes of a student as a stage trains it.

    Attributes:
        in_mixers, rest: trained weights of mixers, and others.
        adapters: those among the others that are LoRA adapters.
        student: bytes of all weights.
        largest_layer: bytes of the largest decoder layer.
        at_once: bytes of the modules that train at once: the student, or in alignment all mixers or one.
        float32: weights of these in float32.
        adamw: trained weights of these that AdamW updates.
        muon: those that Muon updates.
        muon_together: the most of one shape, which Muon updates together.
    """

    in_mixers: int
    rest: int
    adapters: int
    student: int
    largest_layer: int
    at_once: int
    float32: int
    adamw: int
    muon: int
    muon_together: int

    @property
    def trained(self) -> int:
        return self.in_mixers + self.rest


def stage_sizes(student: PreTrainedModel, stages: Sequence[Stage]) -> Iterator[StageSizes]:
    """Sizes of consecutive stages, each prepared as it will be when it runs, on a copy of the student without memory.

    Args:
        student: the model before the first of the stages; it is not changed.
    """
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in student.parameters()}
    model: PreTrainedModel = deepcopy(student, empty)  # type: ignore[arg-type]
    for stage in stages:
        with torch.device("meta"):  # adapters take no memory either
            train_for(model, stage, seed=0)
        yield _as_trained(model, stage)
        merge_lora(model)


def _as_trained(model: PreTrainedModel, stage: Stage) -> StageSizes:
    converted = list(mixers(model).values())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    adapters = {p for name, p in trained.items() if "lora_" in name}
    new = {p for mixer in converted for part in mixer.new_parts() for p in part.parameters() if p.requires_grad}
    modules: list[nn.Module] = [model]
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
    in_mixers = sum(p.numel() for p in new - adapters)
    return StageSizes(
        in_mixers=in_mixers,
        rest=sum(p.numel() for p in trained.values()) - in_mixers,
        adapters=sum(p.numel() for p in adapters),
        student=_nbytes(model),
        largest_layer=max(_nbytes(layer) for layer in decoder_layers(model)),
        at_once=sum(p.nbytes for p in at_once),
        float32=sum(p.numel() for p in at_once if p.dtype == torch.float32),
        adamw=adamw,
        muon=muon.total(),
        muon_together=max(muon.values(), default=0),
    )


def _numel(module: nn.Module) -> int:
    """The number of weights; tied weights count once."""
    return sum(p.numel() for p in module.parameters())


def _nbytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def _matrices(module: nn.Module) -> int:
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))
