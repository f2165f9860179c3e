"""Log-likelihood and greedy exact match of continuations, computed in batches that are limited by tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

# Share of the accelerator's memory for one copy of a batch's logits; three copies exist during normalisation.
_LOGIT_SHARE = 0.05
_MAX_TOKENS_CUDA = 65536
_MAX_TOKENS_CPU = 2048
# Number of positions whose logits are normalised in float32 at a time.
_ROWS = 4096
# Sequence lengths are padded to a multiple of this, because kernels are compiled per shape.
LENGTH_STEP = 16


@dataclass(frozen=True)
class TokenRequest:
    """A continuation to score: `targets` are the tokens after each of the last `len(targets)` positions of `inputs`."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]

    @classmethod
    def truncated(cls, context: list[int], continuation: list[int], max_length: int) -> TokenRequest:
        """A request whose inputs are cut on the left to `max_length` tokens.

        Raises ValueError if the context or the continuation is empty, or the continuation longer than `max_length`.
        """
        if not context or not continuation or len(continuation) > max_length:
            raise ValueError(
                f"a request needs a context, a continuation and at most {max_length} continuation tokens, "
                f"got {len(context)} and {len(continuation)} tokens"
            )
        whole = tuple(context + continuation)[-(max_length + 1) :]
        return cls(whole[:-1], tuple(continuation))


def token_budget(model: PreTrainedModel) -> int:
    """Number of padded tokens per forward pass that limits the logits to a small share of the device's memory."""
    if model.device.type != "cuda":
        return _MAX_TOKENS_CPU
    vocabulary = model.get_output_embeddings().weight.shape[0]
    memory = torch.cuda.get_device_properties(model.device).total_memory
    bytes_per_token = vocabulary * model.dtype.itemsize
    return int(min(_MAX_TOKENS_CUDA, max(2048, _LOGIT_SHARE * memory / bytes_per_token)))


def score_continuations(
    last_logits: Callable[[Tensor, int], Tensor],
    requests: list[TokenRequest],
    device: torch.device,
    max_tokens: int,
    max_rows: int | None = None,
    on_progress: Callable[[int], object] | None = None,
) -> list[tuple[float, bool]]:
    """Score each request; the results are in the order of the requests.

    Args:
        last_logits: function (ids [B, T] int64, keep) -> logits [B, keep, V] of the last `keep` positions. Rows are
            padded on the right without a mask, which is exact for causal models.
        max_tokens: largest number of padded tokens per batch; a batch has at least one row.
        max_rows: largest number of rows per batch; None for no limit.
        on_progress: called after each batch with the number of requests in it.

    Returns, per request, the sum of the targets' log-probabilities in nats, and whether greedy decoding gives exactly
    the targets. Requests with equal inputs share a row. Log-probabilities are normalised in float32 and summed in
    float64, so a rerun gives the same bits.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(request.inputs, []).append(index)
    rows = sorted(groups, key=lambda inputs: (-len(inputs), inputs))
    answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
    begin = 0
    while begin < len(rows):
        size = max(1, max_tokens // len(rows[begin]))
        batch = rows[begin : begin + min(size, max_rows or size)]
        begin += len(batch)
        members = [(row, index) for row, inputs in enumerate(batch) for index in groups[inputs]]
        for (_, index), answer in zip(
            members, _score_batch(last_logits, requests, batch, members, device), strict=True
        ):
            answers[index] = answer
        if on_progress is not None:
            on_progress(len(members))
    return answers


def _score_batch(
    last_logits: Callable[[Tensor, int], Tensor],
    requests: list[TokenRequest],
    batch: list[tuple[int, ...]],
    members: list[tuple[int, int]],
    device: torch.device,
) -> list[tuple[float, bool]]:
    """The results for `members`, which are pairs (row in `batch`, index of the request)."""
    ids = padded(batch, device)
    length = ids.shape[1]
    counts = np.array([len(requests[index].targets) for _, index in members])
    ends = np.array([len(batch[row]) for row, _ in members])
    keep = int(length - (ends - counts).min())
    logits = last_logits(ids, keep)  # [B, keep, V]

    rows = np.repeat([row for row, _ in members], counts)
    places = np.concatenate([np.arange(e - c, e) for e, c in zip(ends, counts, strict=True)]) - (length - keep)
    targets = np.concatenate([requests[index].targets for _, index in members])
    nats, hits = token_outcomes(logits, *(torch.from_numpy(x).to(device) for x in (rows, places, targets)))
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    sums, exact = np.add.reduceat(nats, starts), np.logical_and.reduceat(hits, starts)
    return [(-float(s), bool(e)) for s, e in zip(sums, exact, strict=True)]


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Rows of token ids, padded with 0 on the right to a multiple of `LENGTH_STEP` [B, T] int64; exact for causal
    models."""
    length = -(-max(map(len, rows)) // LENGTH_STEP) * LENGTH_STEP
    ids = np.zeros((len(rows), length), dtype=np.int64)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = tokens
    return torch.from_numpy(ids).to(device)


def token_outcomes(logits: Tensor, rows: Tensor, places: Tensor, targets: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Negative log-probabilities [M] float64 of tokens in nats, and whether each is the most likely one [M] bool.

    Args:
        logits: [B, K, V].
        rows, places: [M] int64, where the logits of each token are.
        targets: the tokens [M] int64.
    """
    losses, hits = [], []
    for row, place, target in zip(rows.split(_ROWS), places.split(_ROWS), targets.split(_ROWS), strict=True):
        chosen = logits[row, place].float()  # [<= _ROWS, V]
        losses.append(torch.nn.functional.cross_entropy(chosen, target, reduction="none"))
        hits.append(chosen.argmax(-1) == target)
    return torch.cat(losses).double().cpu().numpy(), torch.cat(hits).cpu().numpy()
