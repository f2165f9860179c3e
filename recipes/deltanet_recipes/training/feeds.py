"""The batches of a stage: this process's share of the mixture's rows, on its device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from deltanet_hf.errors import UserError
from deltanet_recipes.data.packing import Mixture, Rows
from deltanet_recipes.schema import Stage, StageBase, stage_name
from deltanet_recipes.training.layer_runner import document_boundaries
from deltanet_recipes.training.objectives import Batch
from deltanet_recipes.training.runtime import Runtime


class RowFeed:
    """Cuts the rows of each step into micro-batches.

    Every process reads all rows of a step, so that it knows how many tokens are scored, and keeps its share.

    Args:
        score_all: count every token as scored (alignment), instead of those with a label.
    """

    def __init__(self, mixture: Mixture, stage: StageBase, runtime: Runtime, score_all: bool) -> None:
        self.mixture, self.stage, self.runtime, self.score_all = mixture, stage, runtime, score_all

    @property
    def state(self) -> Any:
        return list(self.mixture.state)

    @state.setter
    def state(self, state: Any) -> None:
        self.mixture.state = list(state)

    def step(self) -> list[Batch]:
        rows = self.mixture.take(self.stage.rows_per_step, self.stage.sequence_length)
        own = self.stage.rows_per_step // self.runtime.world
        first = self.runtime.rank * own
        return list(self._batches(rows, first, first + own))

    def evaluation(self, rows: Rows) -> list[Batch]:
        """All given rows as batches of one size, the same on every process, each counted as one step."""
        return [batch for piece in pieces(rows, self._size) for batch in self._batches(piece, 0, len(piece))]

    @property
    def _size(self) -> int:
        return micro_batch_rows(self.stage, self.runtime.world)

    def _batches(self, rows: Rows, first: int, last: int) -> Iterator[Batch]:
        count = rows.input_ids.numel() if self.score_all else int(rows.scored.sum())
        scored = torch.full((), float(max(1, count)), device=self.runtime.device)  # torch.tensor would synchronise
        for begin in range(first, last, self._size):
            piece = rows[begin : min(begin + self._size, last)]
            boundaries = document_boundaries(piece.position_ids)  # on the host, to avoid a synchronisation
            boundaries = None if boundaries is None else boundaries.to(self.runtime.device)
            yield Batch(piece.to(self.runtime.device), boundaries, scored)


def pieces(rows: Rows, most: int) -> list[Rows]:
    """The rows in order, in pieces of the same size: the largest up to `most` that leaves none out."""
    if not len(rows):
        return []
    size = next(size for size in range(most, 0, -1) if len(rows) % size == 0)
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]


def micro_batch_rows(stage: StageBase, world: int) -> int:
    """Rows of a micro-batch of one process; never more than its share of the step."""
    share = stage.rows_per_step // world
    return min(stage.micro_batch_rows or share, share)


def check_share(stage: Stage, world: int) -> None:
    """Raise UserError if `world` processes cannot share the rows of a step evenly, which would leave rows out."""
    share, rest = divmod(stage.rows_per_step, world)
    if rest:
        raise UserError(
            f"stages.{stage_name(stage)}: {world} processes cannot share the {stage.rows_per_step} rows of a step "
            f"evenly; make batch_tokens a multiple of {world} x sequence_length"
        )
    if stage.layerwise and share % micro_batch_rows(stage, world):
        raise UserError(
            f"stages.{stage_name(stage)}: micro_batch_rows ({stage.micro_batch_rows}) must divide the {share} rows "
            "that each process has of a step"
        )
