"""Losses of a switchable model: of one set of kept units, with each of several changes, and derivatives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .objectives import AnswerLoss, Objective, TextKL
from .switchable import SwitchableModel
from .units import Unit

CPU_BYTES = 2 * 10**9  # for the activations of one batch
GPU_SHARE = 0.3  # of the accelerator's memory that the weights leave, for the same
MOST_ROWS = 64
GRADIENT_COST = 24  # layers' activations that a row holds for its backward pass, per layer input of a forward pass

Tick = Callable[[float], None]  # called with the share of the work that is done


class Scorer:
    """Runs a model over an objective in batches that fit into memory."""

    def __init__(self, model: SwitchableModel, tick: Tick = lambda share: None) -> None:
        self.model, self.tick = model, tick
        self.device = model.model.device

    @torch.no_grad()
    def losses(self, objective: Objective, kept: Collection[Unit] | None) -> Tensor:
        """Losses [P] with these units kept; of the teacher for None."""
        if kept is None:
            self.model.keep_all()
        else:
            self.model.keep(kept)
        total = torch.zeros(len(objective.names))
        for start, ids in self._batches(objective):
            logits = self.model.logits(ids, objective.positions)
            if kept is None and isinstance(objective, TextKL) and len(objective.teacher) < len(objective.ids):
                objective.learn(logits)
            total += objective.sums(logits, start).cpu()
        return total / objective.counts()

    @torch.no_grad()
    def with_each(
        self, objective: Objective, layers: Sequence[int], change: Callable[[int | None], None]
    ) -> tuple[Tensor, Tensor]:
        """Losses [P] of the model after change(None), and [N, P] after change(0), change(1), ...

        Args:
            layers: [N], the first layer whose output each of the changes moves; those below are not computed again.
        """
        base, totals = torch.zeros(len(objective.names)), torch.zeros(len(layers), len(objective.names))
        work = list(self._batches(objective))
        for done, (start, ids) in enumerate(work):
            change(None)
            base += objective.sums(self.model.logits(ids, objective.positions, record=True), start).cpu()
            for place, layer in enumerate(layers):
                change(place)
                logits = self.model.logits_from(layer, ids, objective.positions)
                totals[place] += objective.sums(logits, start).cpu()
                self.tick((done + (place + 1) / len(layers)) / len(work))
        self.model.forget()
        return base / objective.counts(), totals / objective.counts()

    def gradients(self, objective: Objective, gates: Tensor, weights: Tensor) -> Tensor:
        """Derivatives [L, KV] of the losses, weighted by `weights` [P], with respect to each head's gate.

        Args:
            gates: [L, KV] float32, where they are taken; 0 for the first form of a head, 1 for the second (`blended`).
        """
        gates = gates.to(self.device, copy=True).requires_grad_()
        scaled = (weights / objective.counts()).to(self.device)
        self.model.gates = gates
        work = list(self._batches(objective, GRADIENT_COST))
        try:
            for done, (start, ids) in enumerate(work):
                with torch.enable_grad():
                    sums = objective.sums(self.model.logits(ids, objective.positions), start)
                    (sums @ scaled).backward()
                self.tick((done + 1) / len(work))
        finally:
            self.model.gates = None
        assert gates.grad is not None
        return gates.grad.cpu()

    def _batches(self, objective: Objective, cost: int = 1) -> Iterator[tuple[int, Tensor]]:
        rows = self._rows(objective, cost)
        for start in range(0, len(objective.ids), rows):
            yield start, objective.ids[start : start + rows].to(self.device)

    def _rows(self, objective: Objective, cost: int) -> int:
        """Rows per batch. It depends on the device's size and not on what is free, so that a rerun is the same."""
        config, length = self.model.config, objective.ids.shape[1]
        item = self.model.model.dtype.itemsize
        inputs = cost * len(self.model.layers) * length * int(config.hidden_size) * item
        working = length * (6 * int(config.intermediate_size) + 8 * int(config.hidden_size)) * item
        if config._attn_implementation == "eager":
            working += 12 * int(config.num_attention_heads) * length**2 * (1 if cost == 1 else len(self.model.layers))
        logits = len(objective.positions) * int(config.vocab_size) * (item + 8)
        if self.device.type != "cuda":
            allowed = float(CPU_BYTES)
        else:
            weights = sum(parameter.nbytes for parameter in self.model.model.parameters())
            memory = torch.cuda.get_device_properties(self.device).total_memory
            allowed = GPU_SHARE * max(0, memory - weights)
        return max(1, min(MOST_ROWS, int(allowed / (inputs + working + logits))))


@dataclass(frozen=True)
class ScaledLoss:
    """The loss of an objective, rescaled: 0 is the teacher, 1 the model that has windows everywhere.

    Attributes:
        scorer: runs the model.
        teacher, windows: losses [P] float32 by part, of the teacher and of windows everywhere. The score is the mean
            over the parts.
    """

    scorer: Scorer
    objective: AnswerLoss | TextKL
    teacher: Tensor
    windows: Tensor

    @property
    def weights(self) -> Tensor:
        """[P]: the score's derivative with respect to each part's loss."""
        return 1 / (self.windows - self.teacher) / len(self.teacher)

    def rescaled(self, losses: Tensor) -> Tensor:
        """Scores [...] of losses [..., P]."""
        return (losses - self.teacher) @ self.weights

    def of(self, kept: Collection[Unit]) -> float:
        """The score with these units kept."""
        return float(self.rescaled(self.scorer.losses(self.objective, kept)))

    def with_each(self, kept: Sequence[Unit], more: Sequence[Unit]) -> tuple[dict[Unit, float], dict[Unit, float]]:
        """The gain of each of `more`, which it takes off the score with the units `kept`, and the score with it."""

        def keep(place: int | None) -> None:
            self.scorer.model.keep(kept if place is None else [*kept, more[place]])

        base, losses = self.scorer.with_each(self.objective, [unit[0] for unit in more], keep)
        before, scores = float(self.rescaled(base)), dict(zip(more, self.rescaled(losses).tolist(), strict=True))
        return {unit: before - score for unit, score in scores.items()}, scores

    def gradients(self, gates: Tensor) -> Tensor:
        """Derivatives [L, KV] of the score with respect to each head's gate; see `Scorer.gradients`."""
        return self.scorer.gradients(self.objective, gates, self.weights)

    def gates(self, kept: Collection[Unit]) -> Tensor:
        """Gates [L, KV] with these units whole and windows elsewhere; 1 for what is no candidate."""
        self.scorer.model.keep(kept)
        return self.scorer.model.full.float()

    def thinned(self, step: int) -> ScaledLoss:
        """The same on every `step`-th probe of each format, or row of text."""
        return replace(self, objective=self.objective.thinned(step))
