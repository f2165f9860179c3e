"""The contract of a task, and the tasks by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Protocol

from torch import Generator, Tensor

IGNORED = -100  # label of positions without a question, as in `torch.nn.functional.cross_entropy`

Batch = tuple[Tensor, Tensor]
"""Inputs and labels, both [N, T] int64 on the CPU; a label is `IGNORED` or the token to predict at that position."""


class Task(Protocol):
    """A task of one size of vocabulary, with batches of every difficulty."""

    name: str
    vocabulary: int
    chance: float
    """Accuracy of the best guess without reading the sequence."""
    trained: int
    """The largest point that occurs in training."""
    points: tuple[int, ...]
    """The lengths or loads at which accuracy is measured, ascending."""
    levels: int
    """Number of levels of difficulty."""
    promoted: ClassVar[float]
    """Accuracy in training from which the next level begins."""

    def training_batch(self, tokens: int, level: int, generator: Generator) -> Batch:
        """A batch of about `tokens` tokens of a level, 0 to `levels` - 1."""
        ...

    def test_batches(self, tokens: int, generator: Generator) -> Iterator[tuple[int, Batch]]:
        """(point, batch of about `tokens` tokens) for every point."""
        ...
