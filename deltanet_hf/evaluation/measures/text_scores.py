"""Perplexity, KL divergence from a teacher, top-1 agreement, and perplexity of an exact repeat.

All are measured on windows of tokens. Per-token values are computed in float32 from logits of any dtype and averaged
in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from deltanet_hf.evaluation.measures.continuations import token_budget
from deltanet_hf.evaluation.measures.scores import Score, mean_score, perplexity_score

# Number of positions whose logits are converted to float32 at a time.
_ROWS = 2048


@dataclass(frozen=True)
class TextScores:
    """Scores of a model on a text; the error of each is taken over windows.

    Attributes:
        kl: mean KL(teacher || model) in nats per token.
        agreement: share of tokens for which teacher and model have the same most likely token.
    """

    perplexity: Score
    kl: Score | None = None
    agreement: Score | None = None


@dataclass
class WindowMeans:
    """Means over the tokens of each window: loss and KL(teacher || model) in nats, and top-1 agreement.

    `divergences` and `agreements` are empty without a teacher.
    """

    losses: list[float] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    agreements: list[float] = field(default_factory=list)


def score_text(model: PreTrainedModel, windows_NT: Tensor, teacher: PreTrainedModel | None = None) -> TextScores:
    """Scores of every token but the first of each window [N, T] int64; the teacher runs on the same batches."""
    means = window_means(model, windows_NT.to(model.device), _batch_rows(model, windows_NT.shape[1]), teacher)
    if teacher is None:
        return TextScores(perplexity_score(means.losses))
    return TextScores(perplexity_score(means.losses), mean_score(means.divergences), mean_score(means.agreements))


def score_repeat(model: PreTrainedModel, segments_NT: Tensor) -> Score:
    """Perplexity of the second copy when each segment [N, T] int64 is given twice in a row.

    It measures verbatim recall over T tokens: a model that can copy reaches almost 1. The error is over segments.
    """
    rows = _batch_rows(model, 2 * segments_NT.shape[1])
    return perplexity_score(repeat_means(model, segments_NT.to(model.device), rows))


@torch.inference_mode()
def window_means(model: nn.Module, windows_NT: Tensor, rows: int, teacher: nn.Module | None = None) -> WindowMeans:
    """Run the model, and the teacher if given, on windows [N, T] int64 on the model's device.

    Args:
        rows: windows per forward pass.
    """
    means = WindowMeans()
    for batch in windows_NT.split(rows):
        logits = _next_token_logits(model, batch)
        means.losses += _mean_rows(token_losses(logits, batch[:, 1:]))
        if teacher is not None:
            teacher_logits = _next_token_logits(teacher, batch)
            means.divergences += _mean_rows(token_divergences(teacher_logits, logits))
            means.agreements += _mean_rows((teacher_logits.argmax(-1) == logits.argmax(-1)).float())
    return means


@torch.inference_mode()
def repeat_means(model: nn.Module, segments_NT: Tensor, rows: int) -> list[float]:
    """Mean loss in nats per token of the second copy of each segment [N, T] int64, `rows` segments per forward pass."""
    length = segments_NT.shape[1]
    means: list[float] = []
    for batch in torch.cat([segments_NT, segments_NT], dim=1).split(rows):
        logits = _next_token_logits(model, batch)[:, length - 1 :]
        means += _mean_rows(token_losses(logits, batch[:, length:]))
    return means


def token_losses(logits_NTV: Tensor, tokens_NT: Tensor) -> Tensor:
    """Cross-entropy [N, T] in nats of tokens under logits of any dtype, in float32."""
    logits, tokens = logits_NTV.flatten(0, 1), tokens_NT.flatten()
    parts = [
        nn.functional.cross_entropy(rows.float(), correct, reduction="none")
        for rows, correct in zip(logits.split(_ROWS), tokens.split(_ROWS), strict=True)
    ]
    return torch.cat(parts).view(tokens_NT.shape)


def token_divergences(teacher_NTV: Tensor, student_NTV: Tensor) -> Tensor:
    """KL(teacher || student) [N, T] in nats from logits of any dtype, in float32."""
    parts = [
        kl_from_log_probs(teacher.float().log_softmax(-1), student.float().log_softmax(-1))
        for teacher, student in zip(
            teacher_NTV.flatten(0, 1).split(_ROWS), student_NTV.flatten(0, 1).split(_ROWS), strict=True
        )
    ]
    return torch.cat(parts).view(teacher_NTV.shape[:2])


def kl_from_log_probs(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) [...] in nats from log-probabilities [..., V]."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _batch_rows(model: PreTrainedModel, length: int) -> int:
    # Half of the budget, because the logits of model and teacher exist at the same time.
    return max(1, token_budget(model) // (2 * length))


def _next_token_logits(model: nn.Module, ids_NT: Tensor) -> Tensor:
    """Logits [N, T - 1, V]; position t predicts token t + 1."""
    return model(ids_NT, use_cache=False).logits[:, :-1]


def _mean_rows(values_NT: Tensor) -> list[float]:
    return values_NT.double().mean(dim=1).cpu().tolist()
