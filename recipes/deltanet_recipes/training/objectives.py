"""The losses of the stages as modules: they take a batch and return the loss and its metrics.

A loss is a sum over tokens divided by `scored`, the number of scored tokens in all micro-batches and processes of the
optimiser step, so that their gradients add up to the gradient of one large batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from deltanet_hf.process_memory import give_back_freed_memory
from deltanet_kernels.common.device import two_streams
from deltanet_recipes.data.packing import Rows
from deltanet_recipes.training.adapters import MergedAdapters
from deltanet_recipes.training.layer_runner import AttentionTaps, LayerInputs, LayerRunner, mixer_output, recomputed
from deltanet_recipes.training.losses import (
    ChunkedLoss,
    ChunkLoss,
    relative_squared_error,
    squared_error,
)
from deltanet_recipes.training.model_pair import mixers

Error = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (output, target) [..., D] -> [...]


@dataclass
class Batch:
    """A micro-batch.

    An objective's `prepare` fills `teacher` and `student`; after that, its forward only does work on the device. A
    forward on an unprepared batch prepares it first, which sharded embeddings require.
    """

    rows: Rows
    cu_seqlens: torch.Tensor | None  # boundaries of packed documents (`layer_runner.document_boundaries`)
    scored: torch.Tensor  # [] float32: scored tokens of the optimiser step
    teacher: LayerInputs | None = None
    student: LayerInputs | None = None


class AlignLoss(nn.Module):
    """Mean over the converted layers of |student's attention output - teacher's|^2 / mean |teacher's|^2.

    The mean square of each layer's teacher output is a constant (`scales`) that is measured once, so that the loss is
    linear in the tokens. `error` is `losses.squared_error`, compiled or not. With `checkpointing`, the activations of
    each mixer are computed again in the backward pass, so that those of one mixer are in memory at once.
    """

    def __init__(
        self, teacher: nn.Module, student: nn.Module, error: Error = squared_error, checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.error, self.checkpointing = error, checkpointing
        self.teacher, self.mixers = teacher, nn.ModuleDict({str(i): m for i, m in mixers(student).items()})
        self.indices = [int(index) for index in self.mixers]
        self.metric_names = [f"error.{index}" for index in self.indices]
        self.scales: torch.Tensor
        self.register_buffer("scales", torch.ones(len(self.indices)), persistent=False)
        self._runner = LayerRunner(teacher)
        self._taps = AttentionTaps(teacher, self.indices)

    def prepare(self, batch: Batch) -> Batch:
        with torch.no_grad():
            entry = self._runner.embed(batch.rows, batch.cu_seqlens)
        return replace(batch, teacher=entry)

    @torch.no_grad()
    def measure_scales(self, batches: list[Batch]) -> None:
        """Set each layer's scale to the mean of |teacher's output|^2 per token over some rows."""
        total = torch.zeros_like(self.scales)
        for batch in batches:
            self._teach(self.prepare(batch))
            total += torch.stack([self._taps.outputs[i].float().square().sum(-1).mean() for i in self.indices])
        self.scales.copy_(total / len(batches))
        self._taps.clear()

    def close(self) -> None:
        """Remove the hooks from the teacher."""
        self._taps.remove()

    def _teach(self, batch: Batch) -> None:
        assert batch.teacher is not None
        with torch.no_grad():
            self._runner.run_layers(batch.teacher, keep=False)
        give_back_freed_memory(batch.teacher.hidden.device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss [] and the relative error of each layer [layers].

        Both are this micro-batch's share of the mean over the optimiser step.
        """
        if batch.teacher is None:
            batch = self.prepare(batch)
        self._teach(batch)
        errors = []
        for place, (index, mixer) in enumerate(zip(self.indices, self.mixers.values(), strict=True)):
            given = (mixer, self._taps.inputs[index], self._taps.outputs[index], batch.cu_seqlens)
            error = recomputed(self._error, *given) if self.checkpointing else self._error(*given)
            errors.append(error / (self.scales[place] * batch.scored))
        self._taps.clear()
        each = torch.stack(errors)
        return each.mean(), each.detach()

    def _error(
        self, mixer: nn.Module, tap: dict[str, Any], target: torch.Tensor, cu_seqlens: torch.Tensor | None
    ) -> torch.Tensor:
        """The squared error [] of a mixer's output, summed over tokens."""
        return self.error(mixer_output(mixer, tap, cu_seqlens), target).sum()


class DistilLoss(nn.Module):
    """KL to the teacher, cross-entropy, and optionally the error of the residual stream after each layer.

    Args:
        student: the model that is trained; adapters are already in place.
        teacher: the model whose distribution it learns.
        chunk_loss: loss of a chunk of tokens (`losses.live_chunk`).
        chunk: number of tokens in a chunk.
        hidden_weight: weight of the mean relative squared error of the residual stream.
        checkpointing: recompute the student's activations, and the errors of the residual stream, in the backward
            pass.
        hidden_error: `losses.relative_squared_error`, compiled or not.
        adapters: those of the student that are multiplied before each of its forward passes.
        positions: those that the teacher was trained on, beyond which tokens have `KlTerms.far_ce_weight` alone; None
            if it is 0.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        chunk_loss: ChunkLoss,
        chunk: int,
        hidden_weight: float = 0.0,
        checkpointing: bool = False,
        hidden_error: Error = relative_squared_error,
        adapters: MergedAdapters | None = None,
        positions: int | None = None,
    ) -> None:
        super().__init__()
        self.adapters, self.positions = adapters, positions
        self.student, self.teacher, self.hidden_error = student, teacher, hidden_error
        self.chunk_loss, self.chunk, self.hidden_weight = chunk_loss, chunk, hidden_weight
        self.checkpointing = checkpointing
        self._student_layers = LayerRunner(student, checkpointing)
        self._teacher_layers = LayerRunner(teacher)
        self.metric_names = ["kl", "ce", *(["hidden"] if hidden_weight > 0 else [])]

    def prepare(self, batch: Batch) -> Batch:
        student = self._student_layers.embed(batch.rows, batch.cu_seqlens)
        with torch.no_grad():
            teacher = self._teacher_layers.embed(batch.rows, batch.cu_seqlens)
        return replace(batch, teacher=teacher, student=student)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss [] and the metrics [KL, cross-entropy, residual-stream error if it has a weight].

        All are this micro-batch's share of the mean per scored token over the optimiser step; KL and residual-stream
        error are means over the tokens that are compared with the teacher.
        """
        if batch.student is None:
            batch = self.prepare(batch)
        assert batch.student is not None
        if self.adapters is not None:
            self.adapters.multiply()
        entry = batch.student
        (hidden, states), (teacher_hidden, teacher_states) = two_streams(
            (lambda: self._student_layers.run_layers(entry), lambda: self._teach(batch)), entry.hidden.device
        )
        per_token: tuple[torch.Tensor, ...] = (teacher_hidden.flatten(0, 1),)
        if self.positions is not None:
            per_token = (*per_token, (batch.rows.position_ids < self.positions).flatten())
        give_back_freed_memory(hidden.device)
        total, kl, ce = ChunkedLoss.apply(
            self.chunk_loss,
            self.chunk,
            hidden.flatten(0, 1),
            self._student_layers.output_weight,
            batch.rows.labels.flatten(),
            per_token,
            self._teacher_layers.output_weight,
        )
        compared = self._compared(batch.rows)
        share = compared.sum().clamp_min(1) / batch.rows.scored.sum().clamp_min(1)
        metrics: list[Any] = [kl / share, ce]
        if self.hidden_weight > 0:
            errors = [self._hidden_error(s, t) for s, t in zip(states, teacher_states, strict=True)]
            hidden_error = (torch.stack(errors).mean(0) * compared).sum()
            total = total + self.hidden_weight * hidden_error
            metrics.append(hidden_error.detach() / share)
        return total / batch.scored, torch.stack(metrics) / batch.scored

    def _compared(self, rows: Rows) -> torch.Tensor:
        """The scored tokens at positions that the teacher was trained on, [R, L] bool."""
        return rows.scored if self.positions is None else rows.scored & (rows.position_ids < self.positions)

    @torch.no_grad()
    def _teach(self, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The teacher's last hidden states [R, L, D'], and those after each layer if `hidden_weight` is not 0."""
        assert batch.teacher is not None
        return self._teacher_layers.run_layers(batch.teacher, keep=self.hidden_weight > 0)

    def _hidden_error(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """The error [R, L] of one layer; with checkpointing, its float32 terms [R, L, D] are not kept."""
        if self.checkpointing:
            return recomputed(self.hidden_error, student, teacher)
        return self.hidden_error(student, teacher)


class LayerLoss(nn.Module):
    """The relative squared error of one mixer on cached inputs and outputs of the teacher's attention."""

    def __init__(self, mixer: nn.Module, index: int) -> None:
        super().__init__()
        self.mixer = mixer
        self.metric_names = [f"error.{index}"]
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def prepare(self, batch: LayerBatch) -> LayerBatch:
        return batch

    def forward(self, batch: LayerBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss [] and the relative error [1], as this micro-batch's share of the mean over the step."""
        output = mixer_output(self.mixer, batch.tap, batch.cu_seqlens)
        error = squared_error(output, batch.target).sum() / (self.scale * batch.scored)
        return error, error.detach().reshape(1)


@dataclass
class LayerBatch:
    """The arguments (`tap`) and the output (`target` [R, L, D]) of one attention layer of the teacher."""

    tap: dict[str, Any]
    target: torch.Tensor
    scored: torch.Tensor
    cu_seqlens: torch.Tensor | None


Objective = AlignLoss | DistilLoss | LayerLoss
"""A loss that a trainer minimises."""
