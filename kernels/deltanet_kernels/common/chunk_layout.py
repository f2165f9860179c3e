"""Cuts sequences into chunks of equal size, so that all chunks are computed at once and only states pass between them.

Chunks are ordered by their number within the sequence: the first chunks of all sequences, then the second ones, and so
on. Sequences are ordered by their number of chunks, the longest first, so that the chunks with one number follow on one
another and belong to the first sequences. For B rows of equal length this is a transposition.

Shapes in comments: B batch, T tokens, N sequences, M chunks of C places, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

# By cu_seqlens: its version, and the layouts by batch, tokens and size. A model's layers read its values only once.
_packed_layouts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class ChunkLayout:
    """Where the tokens of a call lie in its chunks; `of` makes it."""

    batch: int
    tokens: int
    size: int  # C
    counts: tuple[int, ...]  # per chunk number, how many sequences have such a chunk; M is their sum
    token_of_place: Tensor | None = None  # [M*C], T where the place is empty; None for rows of equal length
    place_of_token: Tensor | None = None  # [T], M*C where a token belongs to no sequence
    order: Tensor | None = None  # [N], the sequences by their number of chunks

    @classmethod
    def of(cls, x: Tensor, size: int, cu_seqlens: Tensor | None = None) -> ChunkLayout:
        """The layout of x [B, T, ...], or of sequences packed into one row with the boundaries `cu_seqlens` [N + 1].

        Raises:
            RuntimeError: packed sequences while a CUDA graph is captured, since the layout depends on their lengths.
        """
        batch, tokens = x.shape[:2]
        if cu_seqlens is None:
            return cls(batch, tokens, size, (batch,) * -(-tokens // size))
        if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "cu_seqlens: this operator reads the lengths of packed sequences, which a CUDA graph cannot record; "
                "train with engine.cuda_graphs: false or with data.isolate_documents: false"
            )
        # Inference tensors do not count their changes, and those made now could not be used in training.
        if cu_seqlens.is_inference() or torch.is_inference_mode_enabled():
            return cls._packed(batch, tokens, size, cu_seqlens)
        version, known = _packed_layouts.get(cu_seqlens, (None, {}))
        if version != cu_seqlens._version:
            known = {}
            _packed_layouts[cu_seqlens] = cu_seqlens._version, known
        key = batch, tokens, size
        if key not in known:
            known[key] = cls._packed(*key, cu_seqlens)
        return known[key]  # type: ignore[no-any-return]

    @classmethod
    def _packed(cls, batch: int, tokens: int, size: int, cu_seqlens: Tensor) -> ChunkLayout:
        offsets = cu_seqlens.tolist()
        chunks = [-(-(end - start) // size) for start, end in pairwise(offsets)]
        order = sorted(range(len(chunks)), key=lambda n: -chunks[n])
        counts = tuple(sum(number < count for count in chunks) for number in range(max(chunks)))
        first = torch.tensor([offsets[n] + number * size for number, count in enumerate(counts) for n in order[:count]])
        end = torch.tensor([offsets[n + 1] for count in counts for n in order[:count]])
        token = first.long().unsqueeze(1) + torch.arange(size)
        token = torch.where(token < end.unsqueeze(1), token, tokens).flatten()
        place = torch.full((tokens + 1,), token.numel())  # the last entry takes the empty places
        place[token] = torch.arange(token.numel())
        device = cu_seqlens.device
        return cls(
            batch, tokens, size, counts, token.to(device), place[:-1].to(device), torch.tensor(order, device=device)
        )

    def cut(self, x: Tensor) -> Tensor:
        """[B, T, H, ...] -> [M, H, C, ...], zeros at empty places."""
        if self.token_of_place is None:
            padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, len(self.counts) * self.size - self.tokens))
            x = padded.unflatten(1, (len(self.counts), self.size)).transpose(0, 1).flatten(0, 1)
        else:
            x = F.pad(x[0], (0, 0) * (x.dim() - 2) + (0, 1)).index_select(0, self.token_of_place)
            x = x.unflatten(0, (sum(self.counts), self.size))
        return x.transpose(1, 2).contiguous()

    def join(self, y: Tensor) -> Tensor:
        """[M, H, C, D] -> [B, T, H, D], zeros for tokens of no sequence."""
        y = y.transpose(1, 2)
        if self.place_of_token is None:
            y = y.unflatten(0, (len(self.counts), self.batch)).transpose(0, 1)
            return y.flatten(1, 2)[:, : self.tokens]
        return F.pad(y.flatten(0, 1), (0, 0, 0, 0, 0, 1)).index_select(0, self.place_of_token).unsqueeze(0)

    def sort(self, states: Tensor) -> Tensor:
        """States [N, ...] in the order of the chunks."""
        return states if self.order is None else states.index_select(0, self.order)

    def unsort(self, states: Tensor) -> Tensor:
        """States [N, ...] from the order of the chunks back to that of the sequences."""
        return states if self.order is None else states.index_select(0, self.order.argsort())
