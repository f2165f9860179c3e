"""Word problems of symmetric groups: the model reads permutations and gives their running product.

The product after t tokens depends on all of them and on their order, and nothing but a state can hold it. The
transition I - beta k k^T with a unit key k swaps two points where beta = 2 and k = (e_a - e_b) / sqrt(2), so an element
that is a product of r transpositions takes r writes; with beta <= 1 none can be written. S2 is parity.

Literature: Merrill et al., "The Illusion of State in State-Space Models" (arXiv 2404.08819); Grazzi et al., "Unlocking
State-Tracking in Linear RNNs Through Negative Eigenvalues" (arXiv 2411.12537); Siems et al., "DeltaProduct" (arXiv
2502.10297).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import ClassVar

import torch
from torch import Generator, Tensor

from measuring.lab.tasks import IGNORED, Batch

SHORTEST = 4  # tokens of the first training sequences
SHARES = (0.05, 0.2, None)  # of a new kind of elements, level by level; None: all elements are equally frequent


@dataclass(frozen=True)
class Level:
    """A level of difficulty.

    Args:
        length: tokens of a word.
        most: largest number of transpositions whose product an element is.
        share: of the elements with `most` transpositions; None for uniform words.
    """

    length: int
    most: int
    share: float | None = None


class WordProblem:
    """The word problem of S_n.

    Training begins with short sequences of transpositions and grows their length. Then elements that are products of
    two, three, ... transpositions join, each kind rarely at first, so that the model sees what a single one does to a
    product that it already tracks. In the end words are uniform over the group, as in all tests.

    Args:
        name: name of the task.
        degree: n, the number of points that are permuted.
        trained: length of the longest training sequences.
    """

    promoted: ClassVar[float] = 0.97

    def __init__(self, name: str, degree: int, trained: int = 32) -> None:
        self.name, self.trained = name, trained
        self.elements = list(permutations(range(degree)))
        index = {element: place for place, element in enumerate(self.elements)}
        self.products = torch.tensor(
            [[index[tuple(a[b[i]] for i in range(degree))] for b in self.elements] for a in self.elements]
        )
        """[later, earlier] -> element that does the earlier one first."""
        self.transpositions = torch.tensor([degree - _cycles(element) for element in self.elements])
        """Smallest number of transpositions whose product an element is."""
        count = len(self.elements)
        self.vocabulary, self.start, self.chance = count + 1, count, 1 / count
        self.curriculum: list[Level] = [Level(SHORTEST, 1)]
        while (length := self.curriculum[-1].length) < trained:
            self.curriculum.append(Level(min(trained, length * 3 // 2), 1))
        self.curriculum += [Level(trained, most, share) for most in range(2, degree) for share in SHARES]
        self.levels = len(self.curriculum)
        self.points = tuple(trained * factor // 8 for factor in (2, 4, 8, 16, 32, 64))

    def training_batch(self, tokens: int, level: int, generator: Generator) -> Batch:
        return self.batch(tokens, self.curriculum[level], generator)

    def test_batches(self, tokens: int, generator: Generator) -> Iterator[tuple[int, Batch]]:
        """The answers that count are those of the last eighth of the sequence."""
        for length in self.points:
            inputs, labels = self.batch(tokens, Level(length, len(self.elements)), generator)
            labels[:, : 1 + length - max(1, length // 8)] = IGNORED
            yield length, (inputs, labels)

    def batch(self, tokens: int, level: Level, generator: Generator) -> Batch:
        """Random words of a level behind a start token, with the running products as labels."""
        shape = (max(1, tokens // (level.length + 1)), level.length)
        words = self._draw(self.transpositions <= level.most, shape, generator)
        if level.share is not None:
            newest = self._draw(self.transpositions == level.most, shape, generator)
            others = self._draw(self.transpositions < level.most, shape, generator)
            words = torch.where(torch.rand(shape, generator=generator) < level.share, newest, others)
        inputs = torch.cat([torch.full_like(words[:, :1], self.start), words], dim=1)
        return inputs, torch.cat([torch.full_like(words[:, :1], IGNORED), self.running_products(words)], dim=1)

    def _draw(self, allowed: Tensor, shape: tuple[int, int], generator: Generator) -> Tensor:
        choices = allowed.nonzero().squeeze(1)
        return choices[torch.randint(len(choices), shape, generator=generator)]

    def running_products(self, words: Tensor) -> Tensor:
        """words [N, T] -> [N, T], the product of the first t words for every t."""
        results = [words[:, 0]]
        for word in words[:, 1:].unbind(1):
            results.append(self.products[word, results[-1]])
        return torch.stack(results, dim=1)


def _cycles(element: Sequence[int]) -> int:
    """Number of cycles of a permutation, fixed points included."""
    seen: set[int] = set()
    count = 0
    for begin in range(len(element)):
        count += begin not in seen
        while begin not in seen:
            seen.add(begin)
            begin = element[begin]
    return count
