"""What a stage minimises, as modules: batch in, (loss, metrics) out.

Losses are sums over tokens divided by `scored`, the number of scored tokens in the whole optimiser step, so that
micro-batches and processes add up to the gradient of one big batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from deltanet_recipes.losses import ChunkedLoss, ChunkLoss, relative_squared_error, squared_error
from deltanet_recipes.models import mixers, output_weight
from deltanet_recipes.packing import Rows
from deltanet_recipes.walk import AttentionTaps, Entry, Walk, mixer_output

Error = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (output, target) [..., D] -> [...]


@dataclass
class Batch:
    """A micro-batch. `prepare` of an objective fills the entries, after which its forward is pure device work; a
    forward on an unprepared batch prepares it itself (embeddings that are trained or sharded need that).
    """

    rows: Rows
    cu_seqlens: torch.Tensor | None  # boundaries of packed documents (`walk.document_boundaries`)
    scored: torch.Tensor  # [] float32: scored tokens of the whole step
    targets: tuple[torch.Tensor, ...] = ()  # cached log-probabilities of the teacher: ids, log_probs [R*L, K]
    teacher: Entry | None = None
    student: Entry | None = None


class Align(nn.Module):
    """Mean over converted layers of |student's attention output - teacher's|^2 / mean |teacher's|^2.

    The mean square of each layer's target is a constant (`scales`), measured once, so that the loss is linear in the
    tokens. `error` is `losses.squared_error`, compiled or not.
    """

    def __init__(self, teacher: nn.Module, student: nn.Module, error: Error = squared_error) -> None:
        super().__init__()
        self.error = error
        self.teacher, self.mixers = teacher, nn.ModuleDict({str(i): m for i, m in mixers(student).items()})
        self.indices = [int(index) for index in self.mixers]
        self.metric_names = [f"error.{index}" for index in self.indices]
        self.scales: torch.Tensor
        self.register_buffer("scales", torch.ones(len(self.indices)), persistent=False)
        self._walk = Walk(teacher)
        self._taps = AttentionTaps(teacher, self.indices)

    def prepare(self, batch: Batch) -> Batch:
        with torch.no_grad():
            entry = self._walk.enter(batch.rows, batch.cu_seqlens)
        return replace(batch, teacher=entry)

    @torch.no_grad()
    def measure_scales(self, batches: list[Batch]) -> None:
        """Set each layer's scale to the mean |target|^2 per token over some rows."""
        total = torch.zeros_like(self.scales)
        for batch in batches:
            self._teach(self.prepare(batch))
            total += torch.stack([self._taps.outputs[i].float().square().sum(-1).mean() for i in self.indices])
        self.scales.copy_(total / len(batches))
        self._taps.clear()

    def close(self) -> None:
        """Take the hooks off the teacher."""
        self._taps.remove()

    def _teach(self, batch: Batch) -> None:
        assert batch.teacher is not None
        with torch.no_grad():
            self._walk.layers(batch.teacher)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss [], each layer's relative error [layers]); both this micro-batch's share of the step's mean."""
        if batch.teacher is None:
            batch = self.prepare(batch)
        self._teach(batch)
        errors = []
        for place, (index, mixer) in enumerate(zip(self.indices, self.mixers.values(), strict=True)):
            output = mixer_output(mixer, self._taps.inputs[index], batch.cu_seqlens)
            error = self.error(output, self._taps.outputs[index]).sum()
            errors.append(error / (self.scales[place] * batch.scored))
        self._taps.clear()
        each = torch.stack(errors)
        return each.mean(), each.detach()


class Distil(nn.Module):
    """KL to the teacher + CE, and optionally the error of the residual stream after each layer.

    Args:
        student: the model that is trained (adapters already in place).
        teacher: the softmax model; None when its log-probabilities come with the batch.
        chunk_loss: loss of a chunk of tokens (`losses.live_chunk` or `losses.cached_chunk`).
        chunk: tokens in a chunk.
        hidden_weight: weight of the residual stream's mean relative squared error.
        checkpointing: recompute the student's activations in the backward pass.
        hidden_error: `losses.relative_squared_error`, compiled or not.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module | None,
        chunk_loss: ChunkLoss,
        chunk: int,
        hidden_weight: float = 0.0,
        checkpointing: bool = False,
        hidden_error: Error = relative_squared_error,
    ) -> None:
        super().__init__()
        self.student, self.teacher, self.hidden_error = student, teacher, hidden_error
        self.chunk_loss, self.chunk, self.hidden_weight = chunk_loss, chunk, hidden_weight
        self._student_walk = Walk(student, checkpointing)
        self._teacher_walk = None if teacher is None else Walk(teacher)
        self.metric_names = ["kl", "ce", *(["hidden"] if hidden_weight > 0 else [])]

    def prepare(self, batch: Batch) -> Batch:
        student = self._student_walk.enter(batch.rows, batch.cu_seqlens)
        teacher = None
        if self._teacher_walk is not None:
            with torch.no_grad():
                teacher = self._teacher_walk.enter(batch.rows, batch.cu_seqlens)
        return replace(batch, teacher=teacher, student=student)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss [], [KL, CE, hidden error]); per scored token, this micro-batch's share of the step's mean."""
        if batch.student is None:
            batch = self.prepare(batch)
        assert batch.student is not None
        per_token: tuple[torch.Tensor, ...] = batch.targets
        shared: tuple[torch.Tensor, ...] = ()
        teacher_states: list[torch.Tensor] = []
        if self._teacher_walk is not None and self.teacher is not None and batch.teacher is not None:
            with torch.no_grad():
                hidden, teacher_states = self._teacher_walk.layers(batch.teacher)
            per_token, shared = (hidden.flatten(0, 1),), (output_weight(self.teacher),)
        hidden, states = self._student_walk.layers(batch.student)
        total, kl, ce = ChunkedLoss.apply(
            self.chunk_loss,
            self.chunk,
            hidden.flatten(0, 1),
            output_weight(self.student),
            batch.rows.labels.flatten(),
            per_token,
            shared,
        )
        metrics: list[Any] = [kl, ce]
        if self.hidden_weight > 0:
            errors = [self.hidden_error(s, t) for s, t in zip(states, teacher_states, strict=True)]
            hidden_error = (torch.stack(errors).mean(0) * batch.rows.scored).sum()
            total = total + self.hidden_weight * hidden_error
            metrics.append(hidden_error.detach())
        return total / batch.scored, torch.stack(metrics) / batch.scored


class AlignLayer(nn.Module):
    """One mixer against cached inputs and outputs of the teacher's attention."""

    def __init__(self, mixer: nn.Module, index: int) -> None:
        super().__init__()
        self.mixer = mixer
        self.metric_names = [f"error.{index}"]
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def prepare(self, batch: LayerBatch) -> LayerBatch:
        return batch

    def forward(self, batch: LayerBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss [], relative error [1]); this micro-batch's share of the step's mean."""
        output = mixer_output(self.mixer, batch.tap, batch.cu_seqlens)
        difference = output.float() - batch.target.float()
        error = difference.square().sum() / (self.scale * batch.scored)
        return error, error.detach().reshape(1)


@dataclass
class LayerBatch:
    """What one attention layer of the teacher received (`tap`) and returned (`target` [R, L, D])."""

    tap: dict[str, Any]
    target: torch.Tensor
    scored: torch.Tensor
    cu_seqlens: torch.Tensor | None
