"""A measured value with its standard error, and the estimators of that error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

_LARGEST_LOSS = 700.0  # nats; exp of more overflows a float64


@dataclass(frozen=True)
class Score:
    """A measured value.

    Attributes:
        stderr: standard error of `value`; nan if there is one item only.
        items: number of independent items.
    """

    value: float
    stderr: float
    items: int

    def to_dict(self) -> dict[str, float | None]:
        """JSON form; an unknown error is null."""
        return {**asdict(self), "stderr": None if math.isnan(self.stderr) else self.stderr}

    def exp(self) -> Score:
        """exp of a mean loss in nats; its error follows from the delta method."""
        value = math.exp(min(self.value, _LARGEST_LOSS))
        return Score(value, value * self.stderr, self.items)


def mean_score(samples: Sequence[float]) -> Score:
    """Mean of independent samples. Raises ValueError for an empty sequence."""
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0:
        raise ValueError("a mean needs at least one sample")
    error = float(values.std(ddof=1) / math.sqrt(values.size)) if values.size > 1 else math.nan
    return Score(float(values.mean()), error, int(values.size))


def perplexity_score(losses: Sequence[float]) -> Score:
    """exp of the mean of independent losses in nats."""
    return mean_score(losses).exp()


def clustered_score(samples: Sequence[float], clusters: Sequence[int]) -> Score:
    """Mean of samples that are independent between clusters but not within one.

    A cluster is, for instance, all questions about one document or all rotations of one question. The error is that
    of the ratio estimator over clusters; `items` counts clusters.

    Args:
        clusters: label of each sample's cluster.
    """
    values, labels = np.asarray(samples, dtype=np.float64), np.asarray(clusters)
    _, index = np.unique(labels, return_inverse=True)
    sums, sizes = np.bincount(index, values), np.bincount(index)
    mean = sums.sum() / sizes.sum()
    count = len(sizes)
    if count < 2:
        return Score(float(mean), math.nan, count)
    residuals = sums - mean * sizes
    variance = count / (count - 1) * float((residuals**2).sum()) / float(sizes.sum()) ** 2
    return Score(float(mean), math.sqrt(variance), count)
