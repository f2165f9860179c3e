"""Multi-query associative recall: pairs of a key and a value, then questions about every key.

The pairs stand in random order among distractors, and so do the questions; where a key occurs again, the model gives
its value. A state of a fixed size holds so many pairs and no more. Literature: Arora et al., "Zoology: Measuring and
Improving Recall in Efficient Language Models" (arXiv 2312.04927).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Generator, Tensor

from measuring.lab.tasks import IGNORED, Batch

KEYS = VALUES = 128
DISTRACTORS = 32
PAIRS: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
TOKENS_PER_PAIR = 4  # key, value, question and one distractor


class AssociativeRecall:
    """The task; `points` are numbers of pairs.

    Training begins with the smallest load. Level by level a larger one joins, and each batch has one of them.
    """

    promoted: ClassVar[float] = 0.6  # a state that is too small for the larger loads is trained on them, too

    def __init__(self, name: str) -> None:
        self.name, self.points, self.trained = name, PAIRS, PAIRS[-1]
        self.vocabulary, self.chance = KEYS + VALUES + DISTRACTORS, 1 / VALUES
        self.levels = len(PAIRS)

    def training_batch(self, tokens: int, level: int, generator: Generator) -> Batch:
        pairs = self.points[int(torch.randint(level + 1, (), generator=generator))]
        return self.batch(max(1, tokens // (TOKENS_PER_PAIR * pairs)), pairs, generator)

    def test_batches(self, tokens: int, generator: Generator) -> Iterator[tuple[int, Batch]]:
        for pairs in self.points:
            yield pairs, self.batch(max(1, tokens // (TOKENS_PER_PAIR * pairs)), pairs, generator)

    def batch(self, rows: int, pairs: int, generator: Generator) -> Batch:
        """Sequences of 4 * pairs tokens; keys of one sequence differ, values may repeat."""
        keys = torch.rand(rows, KEYS, generator=generator).argsort(dim=1)[:, :pairs]
        values = KEYS + torch.randint(VALUES, (rows, pairs), generator=generator)
        noise = KEYS + VALUES + torch.randint(DISTRACTORS, (rows, pairs), generator=generator)
        noise, more = noise.split((pairs // 2, pairs - pairs // 2), dim=1)
        context, _ = _shuffled(torch.stack([keys, values], dim=2), noise, generator)
        questions, order = _shuffled(keys.unsqueeze(2), more, generator)
        answers = torch.cat([values, torch.full_like(more, IGNORED)], dim=1).gather(1, order)
        return torch.cat([context, questions], dim=1), torch.cat([torch.full_like(context, IGNORED), answers], dim=1)


def _shuffled(units: Tensor, singles: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """Units [N, U, W] and single tokens [N, S] in random order -> tokens [N, U * W + S], order [N, U + S].

    The tokens of a unit stay together. `order` lists, by place, the units (0 to U - 1) and single tokens (from U on).
    """
    rows, count, width = units.shape
    order = torch.rand(rows, count + singles.shape[1], generator=generator).argsort(dim=1)
    widths = torch.where(order < count, width, 1)
    begins = torch.empty_like(order).scatter_(1, order, widths.cumsum(1) - widths)
    tokens = units.new_empty(rows, count * width + singles.shape[1])
    for place in range(width):
        tokens.scatter_(1, begins[:, :count] + place, units[:, :, place])
    return tokens.scatter_(1, begins[:, count:], singles), order
