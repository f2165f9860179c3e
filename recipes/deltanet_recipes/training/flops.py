"""Counts the floating-point operations of a training step per token, from the sizes of the models.

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

from dataclasses import dataclass

from deltanet_recipes.schema import Align, Stage


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
    """

    converted: bool
    teacher: int
    matrices: int
    in_mixer: int
    states: int
    passed: int


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


@dataclass(frozen=True)
class Flops:
    """Operations per training token by part of the step."""

    teacher: float
    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.teacher + self.forward + self.backward


def training_flops(stage: Stage, models: ModelSizes, trained: int, adapters: int) -> Flops:
    """Operations per token of one stage, which trains so many weights, adapters among them; those of layerwise
    alignment are summed over all mixers."""
    layers, converted = models.layers, [layer for layer in models.layers if layer.converted]
    softmax = 2.0 * stage.sequence_length * models.queries  # of one layer
    mixing = 6.0 * sum(layer.states for layer in converted)
    own, in_mixers = (sum(layer.matrices for layer in layers), sum(layer.in_mixer for layer in layers))
    teacher = 2.0 * (own - in_mixers + len(converted) * models.attention) + len(layers) * softmax
    if isinstance(stage, Align):
        forward = 2.0 * in_mixers + mixing
        return Flops(0.0 if stage.layerwise else teacher, forward, forward + mixing)
    passes = 2 if stage.recall_weight > 0 else 1
    head = models.vocabulary * models.hidden
    mixed = mixing + (len(layers) - len(converted)) * softmax
    through = 2.0 * (own + head + adapters)
    return Flops(passes * (teacher + 2.0 * head), through + mixed, through + 2.0 * trained + 2 * mixed)
