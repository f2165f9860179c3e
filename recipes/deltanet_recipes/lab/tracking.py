"""Word problems of symmetric groups: the model reads permutations and gives their running product.

The product after t tokens depends on all of them and on their order, and nothing but a state can hold it. The transition
I - beta k k^T with a unit key k swaps two points where beta = 2 and k = (e_a - e_b) / sqrt(2), so an element that is a
product of r transpositions takes r writes; with beta <= 1 none can be written. S2 is parity.

Literature: Merrill et al., "The Illusion of State in State-Space Models" (arXiv 2404.08819); Grazzi et al., "Unlocking
State-Tracking in Linear RNNs Through Negative Eigenvalues" (arXiv 2411.12537); Siems et al., "DeltaProduct" (arXiv
2502.10297).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import ClassVar

import torch
from torch import Generator, Tensor

from deltanet_recipes.lab.tasks import IGNORED, Batch

SHORTEST = 4  # tokens of the first training sequences
ALL_ELEMENTS_AT = 0.4  # share of training after which every element occurs
FULL_LENGTH_AT = 0.8  # share of training after which sequences have the full length


class WordProblem:
    """The word problem of S_n.

    Training begins with short sequences of transpositions. Elements that are products of two, three, ... transpositions
    join one after the other, while the length grows; in the end words are uniform over the group, as in all tests. The
    schedule depends on the number of steps only, so that every model sees the same data.

    Args:
        name: name of the task.
        degree: n, the number of points that are permuted.
        trained: length of the longest training sequences.
    """

    axis: ClassVar[str] = "length"

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
        self.by_transpositions = self.transpositions.argsort(stable=True)
        count = len(self.elements)
        self.vocabulary, self.start, self.chance = count + 1, count, 1 / count
        self.points = tuple(trained * factor // 8 for factor in (2, 4, 8, 16, 32, 64))

    def training_batch(self, tokens: int, progress: float, generator: Generator) -> Batch:
        longest = max(1, int(self.transpositions.max()))
        allowed = min(longest, 1 + int(progress / ALL_ELEMENTS_AT * longest))
        growth = min(1.0, max(0.0, progress - ALL_ELEMENTS_AT) / (FULL_LENGTH_AT - ALL_ELEMENTS_AT))
        length = round(SHORTEST * (self.trained / SHORTEST) ** growth)
        return self.batch(max(1, tokens // (length + 1)), length, allowed, generator)

    def test_batches(self, tokens: int, generator: Generator) -> Iterator[tuple[int, Batch]]:
        """The answers that count are those of the last eighth of the sequence."""
        for length in self.points:
            inputs, labels = self.batch(max(1, tokens // (length + 1)), length, len(self.elements), generator)
            labels[:, : 1 + length - max(1, length // 8)] = IGNORED
            yield length, (inputs, labels)

    def batch(self, rows: int, length: int, allowed: int, generator: Generator) -> Batch:
        """Uniform words over the elements of at most `allowed` transpositions, behind a start token."""
        count = int((self.transpositions <= allowed).sum())
        words = self.by_transpositions[torch.randint(count, (rows, length), generator=generator)]
        inputs = torch.cat([torch.full((rows, 1), self.start), words], dim=1)
        return inputs, torch.cat([torch.full((rows, 1), IGNORED), self.running_products(words)], dim=1)

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
