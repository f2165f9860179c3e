"""Perplexity, KL divergence from the teacher, and the perplexity of an exact repeat, on windows of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from deltanet_hf.evaluation.scores import Score, mean_score, perplexity_score
from deltanet_hf.evaluation.scoring import token_budget

# Rows of logits in float32 at a time.
_ROWS = 2048


@dataclass(frozen=True)
class TextScores:
    """Perplexity of a model and, against a teacher, mean KL(teacher || model) in nats a token and top-1 agreement."""

    perplexity: Score
    kl: Score | None = None
    agreement: Score | None = None


@torch.inference_mode()
def score_text(model: PreTrainedModel, windows_NT: Tensor, teacher: PreTrainedModel | None = None) -> TextScores:
    """Score every token but the first of each window [N, T]; errors are over windows.

    The teacher runs on the same windows in the same batches; KL(teacher || model) is summed in float32.
    """
    losses: list[float] = []
    divergences: list[float] = []
    agreements: list[float] = []
    for batch in _batches(model, windows_NT):
        targets = batch[:, 1:]
        logits = _logits(model, batch)
        losses += _mean_rows(_cross_entropy(logits, targets))
        if teacher is not None:
            taught = _logits(teacher, batch)
            divergences += _mean_rows(_divergence(taught, logits))
            agreements += _mean_rows((taught.argmax(-1) == logits.argmax(-1)).float())
    if teacher is None:
        return TextScores(perplexity_score(losses))
    return TextScores(perplexity_score(losses), mean_score(divergences), mean_score(agreements))


@torch.inference_mode()
def score_repeat(model: PreTrainedModel, segments_NT: Tensor) -> Score:
    """Perplexity of the second copy when each segment [N, T] is given twice in a row; the error is over segments.

    It measures verbatim recall over T tokens: a model that can copy reaches almost 1.
    """
    length = segments_NT.shape[1]
    losses: list[float] = []
    for batch in _batches(model, torch.cat([segments_NT, segments_NT], dim=1)):
        logits = _logits(model, batch)[:, length - 1 :]
        losses += _mean_rows(_cross_entropy(logits, batch[:, length:]))
    return perplexity_score(losses)


def _batches(model: PreTrainedModel, windows_NT: Tensor) -> Iterator[Tensor]:
    # Two sets of logits of a batch live at once, so half of the budget.
    rows = max(1, token_budget(model) // (2 * windows_NT.shape[1]))
    for start in range(0, windows_NT.shape[0], rows):
        yield windows_NT[start : start + rows].to(model.device)


def _logits(model: PreTrainedModel, ids_NT: Tensor) -> Tensor:
    """Logits [N, T - 1, V] of the next token."""
    return model(ids_NT, use_cache=False).logits[:, :-1]


def _mean_rows(values_NT: Tensor) -> list[float]:
    return values_NT.double().mean(dim=1).cpu().tolist()


def _cross_entropy(logits_NTV: Tensor, targets_NT: Tensor) -> Tensor:
    flat, targets = logits_NTV.flatten(0, 1), targets_NT.flatten()
    parts = [
        torch.nn.functional.cross_entropy(rows.float(), wanted, reduction="none")
        for rows, wanted in zip(flat.split(_ROWS), targets.split(_ROWS), strict=True)
    ]
    return torch.cat(parts).view(targets_NT.shape)


def _divergence(teacher_NTV: Tensor, student_NTV: Tensor) -> Tensor:
    """KL(teacher || student) [N, T], in nats."""
    parts = []
    for taught, learnt in zip(
        teacher_NTV.flatten(0, 1).split(_ROWS), student_NTV.flatten(0, 1).split(_ROWS), strict=True
    ):
        log_p, log_q = taught.float().log_softmax(-1), learnt.float().log_softmax(-1)
        parts.append((log_p.exp() * (log_p - log_q)).sum(-1))
    return torch.cat(parts).view(teacher_NTV.shape[:2])
