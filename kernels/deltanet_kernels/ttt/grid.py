"""The places of a call's tokens in the mini-batches.

A row whose state is in the middle of a mini-batch begins as many places later, and padding has no place. So the
mini-batches of all rows begin at multiples of m, whatever the padding and whatever was read before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Grid:
    """Tokens [B, T] on places [B, W]; `of` makes it."""

    cu_seqlens: Tensor | None  # of the sequences on the grid
    ends: Tensor  # [N], the place after the last token of each sequence
    token_of_place: Tensor | None = None  # [B, W], T where a place is empty; None if place = token
    place_of_token: Tensor | None = None  # [B, T], W for padding

    @classmethod
    def of(
        cls, x: Tensor, mini_batch: int, count: Tensor | None, padding: Tensor | None, cu_seqlens: Tensor | None
    ) -> Grid:
        """The grid for x [B, T, ...]; count [B], the tokens of the mini-batch before, is None for zeros."""
        batch, tokens = x.shape[:2]
        if count is None and padding is None:
            ends = torch.full((batch,), tokens, device=x.device) if cu_seqlens is None else cu_seqlens.diff()
            return cls(cu_seqlens, ends)
        real = torch.ones(batch, tokens, dtype=torch.bool, device=x.device) if padding is None else ~padding
        number = real.cumsum(1)  # of each token among the real ones, from 1
        width = tokens
        if count is not None:
            number = number + count.unsqueeze(1)
            width += mini_batch - 1
        place = torch.where(real, number - 1, width)
        token = torch.full((batch, width + 1), tokens, device=x.device)
        token.scatter_(1, place, torch.arange(tokens, device=x.device).expand(batch, -1))
        if cu_seqlens is None:
            return cls(None, number[:, -1], token[:, :-1], place)
        boundaries = F.pad(real[0].cumsum(0), (1, 0))[cu_seqlens.long()]
        return cls(boundaries, boundaries.diff(), token[:, :-1], place)

    def spread(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [B, W, ...], zeros at empty places."""
        return x if self.token_of_place is None else _gathered(x, self.token_of_place)

    def collect(self, y: Tensor) -> Tensor:
        """[B, W, ...] -> [B, T, ...], zeros at padding."""
        return y if self.place_of_token is None else _gathered(y, self.place_of_token)


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    """x [B, n, ...] at index [B, m], zeros where the index is n."""
    padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, 1))
    return padded[torch.arange(len(x), device=x.device).unsqueeze(1), index]
