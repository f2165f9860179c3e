"""Estimates the resident memory of a conversion, within a quarter of the measured peaks (docs/research/conversion.md).

The peak is that of the layer that takes the most, or of the output head. Weights, hidden states and
logits are counted from shapes, in bytes. What a fit takes beside them is the samples that it keeps, times a measured
factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from deltanet_hf.process_memory import runtime_bytes

from .calibration_text import HELD_OUT_TOKENS
from .compare_to_teacher import LOGIT_TOKENS
from .expert_stream import expert_parameters
from .start.samples import KEPT_BYTES
from .teacher_model import Teacher

FLOAT = 4  # bytes of a float32 number, in which layers run
SAMPLE_VALUES = 6  # numbers per token and channel: q, k, v, and the outputs of the heads, the window and the layer
FIT_FACTOR = 2.2  # memory of a fit, divided by that of the samples that it keeps; measured
SOFTMAX_SCORES = 3  # scores of eager attention that exist at once
LOGITS = 5  # logits of `LOGIT_TOKENS` tokens that exist at once: of both models, their log-probabilities, and the KL


@dataclass(frozen=True)
class ConversionMemory:
    """The parts of the peak in bytes.

    Attributes:
        process: libraries and the tokenizer.
        between: the hidden states between two layers, in memory and in the file of a resumable run.
        layer: the layer that takes the most, with its own hidden states.
        head: the output head.
    """

    process: int
    between: int
    layer: int
    head: int

    @property
    def peak(self) -> int:
        """The whole process."""
        return self.process + self.between + max(self.layer, self.head)


def conversion_memory(
    teacher: Teacher, attentions: Sequence[Any], row: int, calibration_tokens: int
) -> ConversionMemory:
    """The estimate.

    Args:
        attentions: per layer, the attention that takes the place of the teacher's; None where the teacher's stays.
        row: tokens per sequence, at most.
    """
    config = teacher.config
    width = int(config.num_attention_heads) * int(teacher.model.model.layers[0].self_attn.head_dim)
    tokens = FLOAT * calibration_tokens
    samples = min(SAMPLE_VALUES * tokens * width, KEPT_BYTES)
    fit = int(tokens * config.hidden_size + FIT_FACTOR * samples)
    if teacher.model.config._attn_implementation == "eager":
        fit += SOFTMAX_SCORES * FLOAT * int(config.num_attention_heads) * min(row, calibration_tokens) ** 2
    embedding = int(config.vocab_size) * int(config.hidden_size) * teacher.dtype.itemsize
    logits = LOGITS * LOGIT_TOKENS * int(config.vocab_size) * FLOAT
    held_out = min(HELD_OUT_TOKENS, calibration_tokens)
    pairs = zip(teacher.model.model.layers, attentions, strict=True)
    return ConversionMemory(
        process=runtime_bytes(config.vocab_size),
        between=(calibration_tokens + 2 * held_out) * int(config.hidden_size) * FLOAT,
        layer=fit + max(_weights(layer, new, teacher.dtype.itemsize) for layer, new in pairs),
        head=embedding + max(embedding, logits),  # while it is read, the pages of its file are mapped beside the copy
    )


def _weights(layer: Any, new: Any, stored_width: int) -> int:
    """Both attentions in float32, one expert in float32, and all else of a layer as it is stored."""
    experts = [parameter for _, _, _, parameter in expert_parameters(layer)]
    attention, in_experts = _count(layer.self_attn), sum(parameter.numel() for parameter in experts)
    one_expert = max((parameter[0].numel() for parameter in experts), default=0)
    in_float = attention + one_expert + (0 if new is None else _count(new))
    return FLOAT * in_float + stored_width * (_count(layer) - attention - in_experts)


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
