"""A measured value with its standard error, and the two ways errors are estimated here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True)
class Score:
    """A value, its standard error (nan when one item leaves it unknown), and the number of independent items."""

    value: float
    stderr: float
    items: int

    def to_dict(self) -> dict[str, float | None]:
        """JSON form; an unknown error is null."""
        return {**asdict(self), "stderr": None if math.isnan(self.stderr) else self.stderr}


def mean_score(samples: Sequence[float]) -> Score:
    """Mean of independent samples."""
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0:
        raise ValueError("a mean needs at least one sample")
    error = float(values.std(ddof=1) / math.sqrt(values.size)) if values.size > 1 else math.nan
    return Score(float(values.mean()), error, int(values.size))


def perplexity_score(losses: Sequence[float]) -> Score:
    """exp(mean) of independent losses in nats; the error by the delta method."""
    mean = mean_score(losses)
    value = math.exp(mean.value)
    return Score(value, value * mean.stderr, mean.items)


def clustered_score(samples: Sequence[float], clusters: Sequence[int]) -> Score:
    """Mean of samples that depend on each other inside a cluster: questions of one document, rotations of one question.

    The error is that of the ratio estimator over clusters; `items` counts clusters.
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
