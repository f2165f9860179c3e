"""Loss, accuracy, and KL divergence and agreement with a teacher of every token of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from deltanet_hf.evaluation.measures.text_scores import token_divergences, token_losses

_LOGITS = 1 << 32  # elements of the logits of a model that exist at once: 8 GiB in bfloat16


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
    batches = [_batch_measures(model, batch, teacher, prefix) for batch in windows_NT.split(rows)]
    return TokenMeasures(*(torch.cat(part).cpu().numpy() for part in zip(*batches, strict=True)))


def _batch_measures(
    model: nn.Module, batch_NT: Tensor, teacher: nn.Module | None, prefix: Sequence[int]
) -> tuple[Tensor, ...]:
    """The fields of `TokenMeasures` that are not None, of one batch. Logits of many tokens are computed in parts."""
    ids, skip, count = _preceded(batch_NT, prefix), len(prefix), batch_NT.shape[1] - 1
    vocabulary = int(model.config.get_text_config().vocab_size)  # type: ignore[operator, union-attr]
    size = max(1, _LOGITS // (len(ids) * vocabulary))
    parts = []
    for begin in range(0, count, size):
        end = min(begin + size, count)

        def logits(of: nn.Module, begin: int = begin, end: int = end) -> Tensor:
            if size >= count:
                return of(ids, use_cache=False).logits[:, skip:-1]  # type: ignore[no-any-return]
            kept = torch.arange(skip + begin, skip + end, device=ids.device)
            return of(ids, use_cache=False, logits_to_keep=kept).logits  # type: ignore[no-any-return]

        found, correct = logits(model), batch_NT[:, 1 + begin : 1 + end]
        best = found.argmax(-1)
        part = [token_losses(found, correct), (best == correct).float()]
        if teacher is not None:
            taught = logits(teacher)
            part += [token_divergences(taught, found), (best == taught.argmax(-1)).float()]
        parts.append(part)
    return tuple(torch.cat(part, dim=1) for part in zip(*parts, strict=True))


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
