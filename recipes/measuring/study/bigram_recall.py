"""Recall in running text: tokens that follow a bigram which occurred before in the window.

Zoology (Arora et al., arXiv 2312.04927) finds most of the gap between linear and softmax models on such tokens. A token
counts by the distance d to the last earlier occurrence of the two tokens before it: token t with x[t-2], x[t-1] =
x[t-2-d], x[t-1-d]. Whether the text goes on as it did there does not matter, so copying blindly does not score.

The control is the teacher with at most 63 tokens of context, for which an occurrence 64 or more tokens back does not
exist. Bigram recall is (student - control) / (teacher - control) in top-1 accuracy over the tokens with d >= 64.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from deltanet_hf.evaluation.measures.relative import Clusters
from measuring.study.token_measures import TokenMeasures

CONTEXT = 64  # tokens of the control's pieces; occurrences nearer than this are not recall
BINS = {"near": (1, 64), "64_to_255": (64, 256), "256_to_1023": (256, 1024), "from_1024": (1024, 1 << 30)}
FAR = (CONTEXT, 1 << 30)


def bigram_distances(windows: np.ndarray) -> np.ndarray:
    """Distance [N, T - 1] to the last earlier occurrence of the bigram before each token but the first; 0 for none.

    Args:
        windows: token ids [N, T].
    """
    count, length = windows.shape
    distances = np.zeros((count, max(0, length - 1)), dtype=np.int64)
    wide = windows.astype(np.int64)
    for row, bigrams in enumerate((wide[:, :-1] << 32) | wide[:, 1:]):
        last: dict[int, int] = {}
        # Bigram i ends at token i + 1 and is followed by token i + 2, which is column i + 1 here.
        for place, bigram in enumerate(bigrams[:-1].tolist()):
            if bigram in last:
                distances[row, place + 1] = place - last[bigram]
            last[bigram] = place
    return distances


def in_range(distances: np.ndarray, limits: tuple[int, int]) -> np.ndarray:
    """Where a distance lies in [begin, end); distance 0, for no occurrence, never does."""
    return (distances >= limits[0]) & (distances < limits[1])


def clusters_where(values: np.ndarray, where: np.ndarray) -> Clusters:
    """Sums per window of `values` [N, T] over the tokens where `where` [N, T] holds."""
    return Clusters((values * where).sum(axis=1, dtype=np.float64), where.sum(axis=1))


def bigram_clusters(measures: TokenMeasures, distances: np.ndarray) -> Mapping[str, Clusters]:
    """Accuracy and KL per bin of distance: `bigram_BIN` and `bigram_BIN_kl`, `bigram` for all distances from 64."""
    found: dict[str, Clusters] = {}
    for name, limits in {"bigram": FAR, **{f"bigram_{name}": limits for name, limits in BINS.items()}}.items():
        where = in_range(distances, limits)
        found[name] = clusters_where(measures.hits, where)
        if measures.divergences is not None:
            found[f"{name}_kl"] = clusters_where(measures.divergences, where)
    return found
