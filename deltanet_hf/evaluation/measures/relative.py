"""A student's score relative to its teacher's, and differences of scores, by a paired bootstrap.

Student, teacher and control answer the same items. Items of one cluster (the answers of a probe, the tokens of a
window) depend on each other, so whole clusters are drawn, the same ones for all models.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deltanet_hf.evaluation.measures.scores import Score

REPLICATES = 2000
LEAST_TEACHER = 0.2  # a teacher below it cannot show what a student kept


@dataclass(frozen=True)
class Clusters:
    """Sums of a measure over the items of each cluster [N], and the numbers of items [N]."""

    sums: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of(cls, samples: Sequence[float] | np.ndarray, owners: Sequence[int] | np.ndarray) -> Clusters:
        """The clusters of samples [M] whose clusters have the labels `owners` [M].

        A cluster is, for instance, all questions about one document.
        """
        _, index = np.unique(np.asarray(owners), return_inverse=True)
        return cls(np.bincount(index, np.asarray(samples, dtype=np.float64)), np.bincount(index))

    @classmethod
    def each(cls, samples: Sequence[float] | np.ndarray) -> Clusters:
        """Samples [N] of which each is a cluster."""
        return cls(np.asarray(samples, dtype=np.float64), np.ones(len(samples), dtype=np.int64))

    @classmethod
    def joined(cls, parts: Sequence[Clusters]) -> Clusters:
        """The clusters of several texts side by side."""
        return cls(np.concatenate([part.sums for part in parts]), np.concatenate([part.sizes for part in parts]))

    def to_list(self) -> list[list[float]]:
        """JSON form."""
        return [self.sums.tolist(), self.sizes.tolist()]

    @classmethod
    def from_list(cls, values: Sequence[Sequence[float]]) -> Clusters:
        """The inverse of `to_list`."""
        sums, sizes = values
        return cls(np.asarray(sums, dtype=np.float64), np.asarray(sizes, dtype=np.int64))

    @property
    def mean(self) -> float:
        """The mean over items; nan without any."""
        items = int(self.sizes.sum())
        return float(self.sums.sum()) / items if items else math.nan

    @property
    def score(self) -> Score:
        """The mean over items; its error is that of the ratio estimator over clusters."""
        count = len(self.sizes)
        if count < 2 or math.isnan(self.mean):
            return Score(self.mean, math.nan, count)
        residuals = self.sums - self.mean * self.sizes
        variance = count / (count - 1) * float((residuals**2).sum()) / float(self.sizes.sum()) ** 2
        return Score(self.mean, math.sqrt(variance), count)

    @property
    def perplexity(self) -> Score:
        """exp of the mean loss in nats."""
        return self.score.exp()


def relative_score(student: Clusters, teacher: Clusters, control: Clusters) -> Score | None:
    """(student - control) / (teacher - control); None if the teacher is below LEAST_TEACHER or not above the control.

    The control is the teacher without the facts, or without the context that holds them.
    """
    if not teacher.mean >= LEAST_TEACHER or teacher.mean <= control.mean:
        return None
    value = (student.mean - control.mean) / (teacher.mean - control.mean)
    draws = _draws(len(teacher.sizes))
    with np.errstate(divide="ignore", invalid="ignore"):
        means = [(draws @ part.sums) / (draws @ part.sizes) for part in (student, teacher, control)]
        ratios = (means[0] - means[2]) / (means[1] - means[2])
    return Score(value, _spread(ratios), len(teacher.sizes))


def paired_difference(one: Clusters, other: Clusters) -> Score:
    """Mean of `one` minus mean of `other` over the same items."""
    draws = _draws(len(one.sizes))
    with np.errstate(divide="ignore", invalid="ignore"):
        differences = (draws @ one.sums) / (draws @ one.sizes) - (draws @ other.sums) / (draws @ other.sizes)
    return Score(one.mean - other.mean, _spread(differences), len(one.sizes))


@functools.lru_cache(maxsize=16)
def _draws(clusters: int) -> np.ndarray:
    """How often each cluster is drawn in each replicate [R, N]; equal for equal numbers of clusters."""
    generator = np.random.default_rng(1234)
    return generator.multinomial(clusters, np.full(clusters, 1 / clusters), size=REPLICATES).astype(np.float64)


def _spread(replicates: np.ndarray) -> float:
    """Standard deviation of the replicates that have a value."""
    finite = replicates[np.isfinite(replicates)]
    return float(finite.std(ddof=1)) if finite.size > 1 else math.nan
