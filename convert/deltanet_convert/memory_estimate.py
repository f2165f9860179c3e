"""Estimates the resident memory of a conversion at its peak, from the shapes of the tensors.

The peak is that of a layer that is fitted, or of the output head. Counts of values per token were taken from what the
allocator gave to each step (tests/convert/test_convert_memory.py), for Gated DeltaNet with and without a window beside
its state; layers of other kinds are counted like these. Freed memory goes back after each layer, so it is not counted.

Sizes are in bytes, activations in float32. D is the hidden size, I that of the MLP, H query heads of d, T tokens of a
sequence, N calibration tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from deltanet_hf.mixers import LayerKind, Mixer
from deltanet_hf.mixers.mixed_heads import MixedHeads
from deltanet_hf.model_sizes import mlp_size
from deltanet_hf.process_memory import runtime_bytes
from deltanet_kernels.window.cpu import block_size

from .calibration_text import HELD_OUT_TOKENS
from .compare_to_teacher import LOGIT_TOKENS
from .expert_stream import expert_parameters
from .start.samples import KEPT_BYTES, SEARCH_TOKENS
from .storage.safetensors_folder import BLOCK_ELEMENTS
from .teacher_model import Teacher, attention_implementation

FLOAT = 4  # bytes of a float32 number
SAMPLE_VALUES = 9  # numbers per token and channel that making a sample takes, those of the sample included
SEARCH_VALUES = 8  # one point of the search: outputs, and the products of their least squares
DESCENT_VALUES = 9  # one step of the descent, forward and backward
CHECK_VALUES = 12  # the new layer's forward pass
WINDOW_SCORES = 3  # scores of a window that exist at once
SOFTMAX_SCORES = 3  # scores of eager attention that exist at once
NORM_SCORES = 8  # scores that exist at once while q/k norms are fitted or compared
LOGITS = 5  # logits of `LOGIT_TOKENS` tokens that exist at once: of both models, their log-probabilities, and the KL


@dataclass(frozen=True)
class ConversionMemory:
    """The parts of the peak.

    Attributes:
        process: libraries and the tokenizer.
        between: hidden states between layers, the teacher's on all text and the student's on the held-out part.
        layer: the layer that takes the most, with all that its fit keeps.
        more: each further layer that is fitted at the same time, with its own hidden states.
        waiting: layers that keep the teacher's attention and wait between those for their turn to be written.
        head: the output head.
    """

    process: int
    between: int
    layer: int
    more: int
    waiting: int
    head: int

    def peak(self, at_once: int) -> int:
        """The whole process, with `at_once` layers that are fitted at the same time."""
        layers = self.layer if at_once == 1 else at_once * self.more + self.waiting
        return self.process + self.between + max(layers, self.head)


def working_bytes(teacher: Teacher, calibration_tokens: int) -> int:
    """The hidden states between two layers, in memory and in the file of a resumable run."""
    held_out = min(HELD_OUT_TOKENS, calibration_tokens)
    return (calibration_tokens + 2 * held_out) * int(teacher.config.hidden_size) * FLOAT


def query_width(teacher: Teacher) -> int:
    """H d: numbers in the queries of a token."""
    attention: Any = teacher.model.model.layers[0].self_attn
    return int(teacher.config.num_attention_heads) * int(attention.head_dim)


def conversion_memory(
    teacher: Teacher, attentions: Sequence[Any], row: int, calibration_tokens: int
) -> ConversionMemory:
    """The estimate.

    Args:
        attentions: per layer, the attention that takes the place of the teacher's; None where the teacher's stays.
        row: tokens per sequence, at most.
    """
    config, layers = teacher.config, teacher.model.model.layers
    pairs = zip(layers, attentions, strict=True)
    sizes = [_LayerSizes(teacher, old, new, row, calibration_tokens) for old, new in pairs]
    one = max(size.weights + size.work for size in sizes)
    own = sizes[0].stream
    embedding = int(config.vocab_size) * int(config.hidden_size) * teacher.dtype.itemsize
    logits = LOGITS * LOGIT_TOKENS * int(config.vocab_size) * FLOAT
    return ConversionMemory(
        process=runtime_bytes(config),
        between=working_bytes(teacher, calibration_tokens),
        layer=one,
        more=one + own,
        waiting=max((sum(run) for run in _kept_runs(sizes)), default=0),
        # While it is read, the pages of its file are mapped beside the copy.
        head=embedding + max(embedding, logits),
    )


def _kept_runs(sizes: Sequence[_LayerSizes]) -> list[list[int]]:
    """Bytes of the layers that are not fitted, in runs of neighbours between two that are."""
    runs: list[list[int]] = [[]]
    for size in sizes:
        if size.changes:
            runs.append([])
        else:
            runs[-1].append(size.weights + size.stream)
    return runs[1:-1]


class _LayerSizes:
    """Bytes of one layer.

    Attributes:
        changes: whether there is something to fit.
        stream: hidden states on the calibration text.
        weights: those of the teacher's layer, its attention in float32 and all else as stored, without experts.
        work: what the largest of its steps takes beside them.
    """

    def __init__(self, teacher: Teacher, old: Any, new: Any, row: int, calibration_tokens: int) -> None:
        config = teacher.config
        self.hidden, self.width = int(config.hidden_size), query_width(teacher)
        self.row = min(row, calibration_tokens)
        self.sequences = math.ceil(calibration_tokens / self.row)
        self.changes = new is not None
        attention = _count(old.self_attn)
        experts = [parameter for _, _, _, parameter in expert_parameters(old)]
        stored = _count(old) - attention - sum(parameter.numel() for parameter in experts)
        self.weights = teacher.dtype.itemsize * stored + FLOAT * attention
        one_expert = FLOAT * max((parameter[0].numel() for parameter in experts), default=0)
        self.stream = FLOAT * self.sequences * self.row * self.hidden
        self.all_scores = FLOAT * int(config.num_attention_heads) * self.row**2
        eager = SOFTMAX_SCORES * self.all_scores if attention_implementation(config) == "eager" else 0
        run = FLOAT * self.row * 3 * (mlp_size(config) + self.hidden) + FLOAT * BLOCK_ELEMENTS + one_expert + eager
        if new is None:
            self.work = run
            return
        # Inputs and outputs of the attention are gathered row by row, and then copied into one tensor each.
        begin = max(4 * self.stream, 2 * self.stream + run)
        held_out = FLOAT * min(HELD_OUT_TOKENS, calibration_tokens) * self.hidden
        fit, check = self._fit(new, eager), self._check(new)
        finish = 2 * held_out + max(2 * held_out, check, run)
        self.work = max(begin, FLOAT * _count(new) + max(self.stream + fit, finish))

    def _fit(self, new: Any, eager: int) -> int:
        if not isinstance(new, LayerKind):
            return NORM_SCORES * self.all_scores
        if not isinstance(new, (Mixer, MixedHeads)):
            return 0
        window = _window(new)
        channels = FLOAT * self.row * self.width
        inputs = FLOAT * self.row * self.hidden
        made = (4 + (window is not None)) * channels + inputs  # q, k, v, outputs of heads, window and layer
        kept = min(self.sequences, max(1, KEPT_BYTES // (made + inputs)))
        search = min(self.sequences, max(1, SEARCH_TOKENS // self.row))
        batch = search * (made + inputs)
        sampling = SAMPLE_VALUES * channels + WINDOW_SCORES * _window_scores(window, self.row) + eager
        # The last of those that are kept is part of `made` already; another is made beside the one before it.
        steps = [
            sampling - made if kept == self.sequences else sampling + made,
            batch + SEARCH_VALUES * search * channels,
            DESCENT_VALUES * channels,
        ]
        if getattr(new, "k_offset", None) is not None:  # two batches, beside the two of the share before
            half = min(self.sequences // 2, search)
            steps.append(4 * half * (made + inputs) + 2 * half * channels)
        return kept * made + max(steps)

    def _check(self, new: Any) -> int:
        if not isinstance(new, LayerKind):
            return NORM_SCORES * self.all_scores
        if not isinstance(new, (Mixer, MixedHeads)):
            return SOFTMAX_SCORES * self.all_scores
        return CHECK_VALUES * FLOAT * self.row * self.width + WINDOW_SCORES * _window_scores(_window(new), self.row)


def _window(new: Any) -> Any:
    """The window beside a state, the mixer that is a window, or None."""
    parts = list(new.branches.values()) if isinstance(new, MixedHeads) else [new]
    found = [getattr(part, "window_branch", None) for part in parts]
    return next((branch for branch in found if branch is not None), None)


def _window_scores(branch: Any, row: int) -> int:
    """The scores of a sequence: blocks of C queries see s sinks and 2 C keys (`deltanet_kernels/window/cpu.py`).

    Those of all heads where scores are capped; flash attention needs a mask, which all heads share.
    """
    if branch is None:
        return 0
    block = block_size(branch.window, row)
    heads = int(branch.heads) if branch.softcap is not None else 1
    return FLOAT * heads * math.ceil(row / block) * block * (branch.sinks + 2 * block)


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
