"""Loss, accuracy, and KL divergence and agreement with a teacher of every token of a text.

Values are computed in float32 from logits of any dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_ROWS = 128  # positions whose logits are in float32 at a time, five times over
_LOGITS = 1 << 32  # elements of the logits of a model that exist at once: 8 GiB in bfloat16

Forward = Callable[..., Any]
"""A causal model, or what answers the same calls."""


@dataclass(frozen=True)
class TokenMeasures:
    """Measures [N, S] float32 of the last S tokens of N windows.

    Attributes:
        losses: negative log-probability in nats.
        hits: 1 where the model's most likely token is the text's, else 0.
        divergences: KL(teacher || model) in nats; None without a teacher.
        agreements: 1 where model and teacher have the same most likely token, else 0; None without a teacher.
    """

    losses: np.ndarray
    hits: np.ndarray
    divergences: np.ndarray | None = None
    agreements: np.ndarray | None = None


@torch.inference_mode()
def token_measures(
    model: Forward, windows_NT: Tensor, scored: int, rows: int, vocabulary: int, teacher: Forward | None = None
) -> TokenMeasures:
    """Run the model, and the teacher if given, on windows [N, T] int64 on the model's device.

    Args:
        scored: tokens at the end of each window that are measured, fewer than T.
        rows: windows per forward pass. Logits of too many tokens are computed in parts, each by a pass of its own.
        vocabulary: of the model.
    """
    batches = [_batch_measures(model, ids, scored, vocabulary, teacher) for ids in windows_NT.split(rows)]
    return TokenMeasures(*(torch.cat(part).cpu().numpy() for part in zip(*batches, strict=True)))


def _batch_measures(
    model: Forward, ids_NT: Tensor, scored: int, vocabulary: int, teacher: Forward | None
) -> tuple[Tensor, ...]:
    """The fields of `TokenMeasures` that are not None, of one batch."""
    length = ids_NT.shape[1]
    size = max(1, _LOGITS // (len(ids_NT) * vocabulary))
    parts = []
    for tokens in torch.arange(length - scored, length, device=ids_NT.device).split(size):
        found, correct = model(ids_NT, use_cache=False, logits_to_keep=tokens - 1).logits, ids_NT[:, tokens]
        best = found.argmax(-1)
        part = [token_losses(found, correct), (best == correct).float()]
        if teacher is not None:
            taught = teacher(ids_NT, use_cache=False, logits_to_keep=tokens - 1).logits
            part += [token_divergences(taught, found), (best == taught.argmax(-1)).float()]
        parts.append(part)
    return tuple(torch.cat(part, dim=1) for part in zip(*parts, strict=True))


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
