"""Counts the floating-point operations of a training step per token, from the shapes of the weights.

A product with a matrix of n weights is 2 n operations per token. In rows of L tokens, causal softmax attention of H
heads of d takes 2 L H d (scores and values, each 2 H d over L / 2 tokens on average), and a recurrent state of n
numbers takes 6 n: it is read for the prediction, written, and read for the output. With the weights of

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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deltanet_hf.model_sizes import head_size
from deltanet_recipes.schema import Align, Stage
from deltanet_recipes.training.model_pair import decoder_layers, mixer_name, output_weight


@dataclass(frozen=True)
class Flops:
    """Operations per training token by part of the step."""

    teacher: float
    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.teacher + self.forward + self.backward


def training_flops(
    stage: Stage, student: nn.Module, converted: Mapping[int, Any], attention: int, trained: int, adapters: int
) -> Flops:
    """Operations per token of one stage; those of layerwise alignment are summed over all mixers.

    Args:
        student: the converted model without adapters; only shapes are read.
        converted: its mixers by layer index.
        attention: weights of one attention layer of the teacher (`attention_weights`).
        trained: number of trained weights.
        adapters: those among them that are LoRA adapters.
    """
    layers, length = decoder_layers(student), stage.sequence_length
    head = output_weight(student).numel()
    own = sum(_matrices(layer) for layer in layers) + _used_experts(student)
    in_mixers = sum(_matrices(mixer) for mixer in converted.values())
    softmax = _softmax(student, length)
    teacher = 2.0 * (own - in_mixers + len(converted) * attention) + len(layers) * softmax
    mixing = {index: _mixing(mixer) for index, mixer in converted.items()}
    if isinstance(stage, Align):
        forward = 2.0 * in_mixers + sum(mixing.values())
        backward = 2.0 * in_mixers + 2 * sum(mixing.values())
        return Flops(0.0 if stage.mode == "layerwise" else teacher, forward, backward)
    passes = 2 if stage.recall_weight > 0 else 1
    mixed = sum(mixing.get(index, softmax) for index in range(len(layers)))
    through = 2.0 * (own + head + adapters)
    return Flops(passes * (teacher + 2.0 * head), through + mixed, through + 2.0 * trained + 2 * mixed)


def attention_weights(student: nn.Module) -> int:
    """Weights of the projections of one attention layer of the teacher."""
    config: Any = student.config
    heads, dim = config.num_attention_heads, head_size(config)
    return int(2 * config.hidden_size * dim * (heads + (config.num_key_value_heads or heads)))


def _softmax(student: nn.Module, length: int) -> float:
    config: Any = student.config
    return 2.0 * length * config.num_attention_heads * head_size(config)


def _mixing(mixer: Any) -> float:
    """Operations of a mixer's states per token."""
    states = (part.recurrent_shapes() for part in mixer.new_parts() if hasattr(part, "recurrent_shapes"))
    shapes = [state.shape for named in states for state in named.values()]
    return 6.0 * sum(torch.Size(shape).numel() for shape in shapes if len(shape) == 3)  # not those of convolutions


def _used_experts(student: nn.Module) -> int:
    """Weights of the experts that a token uses."""
    sizes = [
        weight.numel() // len(weight)
        for layer in decoder_layers(student)
        for name, weight in layer.named_parameters()
        if weight.dim() == 3 and not name.startswith(mixer_name(layer))
    ]
    return sum(sizes) * int(getattr(student.config, "num_experts_per_tok", 0))


def _matrices(module: nn.Module) -> int:
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))
