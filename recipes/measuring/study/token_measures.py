"""Loss, accuracy, and KL divergence and agreement with a teacher of every token of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from deltanet_hf.evaluation.measures.text_scores import token_divergences, token_losses


@dataclass(frozen=True)
class TokenMeasures:
    """Measures [N, T - 1] float32 of the tokens after the first of N windows of T tokens.

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
    model: nn.Module, windows_NT: Tensor, rows: int, teacher: nn.Module | None = None, prefix: Sequence[int] = ()
) -> TokenMeasures:
    """Run the model, and the teacher if given, on windows [N, T] int64 on the model's device.

    Args:
        rows: windows per forward pass.
        prefix: tokens that precede every window and are not scored.
    """
    losses, hits, divergences, agreements = [], [], [], []
    skip = len(prefix)
    for batch in windows_NT.split(rows):
        ids, correct = _preceded(batch, prefix), batch[:, 1:]
        logits = model(ids, use_cache=False).logits[:, skip:-1]
        best = logits.argmax(-1)
        losses.append(token_losses(logits, correct))
        hits.append((best == correct).float())
        if teacher is not None:
            taught = teacher(ids, use_cache=False).logits[:, skip:-1]
            divergences.append(token_divergences(taught, logits))
            agreements.append((best == taught.argmax(-1)).float())
    parts = [torch.cat(part).cpu().numpy() if part else None for part in (losses, hits, divergences, agreements)]
    return TokenMeasures(*parts)  # type: ignore[arg-type]


@torch.inference_mode()
def short_context_hits(
    model: nn.Module, windows_NT: Tensor, context: int, rows: int, prefix: Sequence[int] = ()
) -> np.ndarray:
    """Hits as in `TokenMeasures`, of a model that sees at most `context` - 1 and at least `context` / 2 tokens before.

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
