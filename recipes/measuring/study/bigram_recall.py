"""Recall in running text: tokens that follow a bigram which occurred before in the window.

Zoology (Arora et al., arXiv 2312.04927) finds most of the gap between linear and softmax models on such tokens. A token
counts by the distance d to the last earlier occurrence of the two tokens before it: token t with x[t-2], x[t-1] =
x[t-2-d], x[t-1-d]. Whether the text goes on as it did there does not matter, so copying blindly does not score.

The control is the teacher with at most 63 tokens of context, for which an occurrence 64 or more tokens back does not
exist. Bigram recall is (student - control) / (teacher - control) in top-1 accuracy over the tokens with d >= 64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

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


def bigram_parts(distances: np.ndarray) -> dict[str, np.ndarray]:
    """The tokens in each bin of distance: `bigram_BIN` [N, T - 1] bool, and `bigram` for all distances from 64."""
    bins = {"bigram": FAR, **{f"bigram_{name}": limits for name, limits in BINS.items()}}
    return {name: in_range(distances, limits) for name, limits in bins.items()}


@torch.inference_mode()
def short_context_hits(
    model: nn.Module, windows_NT: Tensor, context: int, rows: int, prefix: Sequence[int] = ()
) -> np.ndarray:
    """Hits [N, T - 1] of a model that sees at most `context` - 1 and at least `context` / 2 tokens before: 1 where its
    most likely token is the text's, else 0.

    Windows are read in overlapping pieces of `context` tokens (even), of which the second half is scored. Near the
    start of a window, all tokens before are seen.

    Args:
        rows: pieces per forward pass.
        prefix: tokens that precede every piece and are not scored.
    """
    half = context // 2
    count, length = windows_NT.shape
    short = max(context - length, -length % half)
    pieces = nn.functional.pad(windows_NT, (0, short)).unfold(1, context, half)  # [N, P, context]
    hits = []
    for batch in pieces.flatten(0, 1).split(rows):
        predicted = model(_preceded(batch, prefix), use_cache=False).logits[:, len(prefix) : -1].argmax(-1)
        hits.append((predicted == batch[:, 1:]).float())
    scored = torch.cat(hits).view(count, pieces.shape[1], context - 1)
    whole = torch.cat([scored[:, 0, : half - 1], scored[:, :, half - 1 :].flatten(1)], dim=1)
    return whole[:, : length - 1].cpu().numpy()


def _preceded(batch_NT: Tensor, prefix: Sequence[int]) -> Tensor:
    """The rows with the prefix before each: [N, K + T]."""
    return torch.cat([batch_NT.new_tensor([list(prefix)] * len(batch_NT)).view(len(batch_NT), -1), batch_NT], dim=1)
