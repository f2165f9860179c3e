"""Packs a mixture of corpora into rows of tokens, deterministically; a few integers suffice to resume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch

from deltanet_hf.errors import UserError
from deltanet_recipes.data.tokens import Corpus


@dataclass
class Rows:
    """R packed rows of L tokens, int64.

    Attributes:
        input_ids: [R, L].
        position_ids: [R, L]; they restart at each document if documents are isolated.
        labels: [R, L], the next token, or -100 where none is learned (after a document's end, inside prompts).
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, rows: slice) -> Rows:
        return Rows(self.input_ids[rows], self.position_ids[rows], self.labels[rows])

    def to(self, device: torch.device) -> Rows:
        """A copy on the device. It goes through pinned memory to a GPU, since it would wait for the GPU otherwise."""
        tensors = (self.input_ids, self.position_ids, self.labels)
        if device.type == "cuda":
            tensors = tuple(t.pin_memory() for t in tensors)  # type: ignore[assignment]
        return Rows(*(t.to(device, non_blocking=True) for t in tensors))

    @property
    def scored(self) -> torch.Tensor:
        """[R, L] bool: positions whose next token is learned."""
        return self.labels >= 0


class TokenStream(Protocol):
    """Where a mixture takes rows from."""

    @property
    def label(self) -> str:
        """Its name in messages."""

    @property
    def weight(self) -> float:
        """Its relative share of the rows."""

    @property
    def length(self) -> float:
        """Its number of distinct tokens."""

    def read(self, cursor: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The token ids [count] int64 from position `cursor` on, and whether each is scored [count] bool."""


class Stream:
    """An endless stream of the tokens of documents `first` to `last` - 1 of a corpus.

    With `shuffle`, the documents come in another order in every pass (epoch).
    """

    def __init__(self, corpus: Corpus, first: int, last: int, seed: int, shuffle: bool) -> None:
        self.corpus, self.first, self.last, self.seed, self.shuffle = corpus, first, last, seed, shuffle
        self.label, self.weight, self.report = corpus.label, corpus.weight, corpus.report
        self.length = int(corpus.starts[last] - corpus.starts[first])
        self._order = lru_cache(maxsize=2)(self._make_order)

    def _make_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents in the order of an epoch, and the position in the epoch at which each ends."""
        order = np.arange(self.first, self.last)
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(order)
        return order, np.cumsum(self.corpus.starts[order + 1] - self.corpus.starts[order])

    def read(self, cursor: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The token ids [count] int64 from position `cursor` on, and whether each is scored [count] bool."""
        ids = np.empty(count, dtype=np.int64)
        scored = np.ones(count, dtype=bool)
        filled = 0
        while filled < count:
            epoch, offset = divmod(cursor + filled, self.length)
            order, ends = self._order(epoch)
            place = int(np.searchsorted(ends, offset, side="right"))
            document_end = int(self.corpus.starts[order[place] + 1])
            begin = document_end - (int(ends[place]) - offset)
            end = min(document_end, begin + count - filled)
            span = slice(filled, filled + end - begin)
            ids[span] = self.corpus.tokens[begin:end]
            if self.corpus.scored is not None:
                scored[span] = self.corpus.scored[begin:end]
            filled += end - begin
        return ids, scored


class Mixture:
    """Draws rows from several streams by weight. A resumed run sets `state`, the tokens taken from each stream.

    Each row comes from the stream that is furthest behind its share, so any prefix of a run has the right mixture.

    Args:
        separator: token id that ends every document.
        isolate: positions restart at each document.
        repeat: start the streams again when they are used up.
        begin: token that every row starts with, for models whose training texts all began with it.
    """

    def __init__(
        self, streams: Sequence[TokenStream], separator: int, isolate: bool, repeat: bool, begin: int | None = None
    ) -> None:
        self.streams, self.separator, self.isolate, self.repeat = list(streams), separator, isolate, repeat
        self.begin = begin
        total = sum(stream.weight for stream in self.streams)
        self.shares = [stream.weight / total for stream in self.streams]
        self.state: list[int] = [0] * len(self.streams)  # tokens taken from each stream

    def check(self, tokens: int) -> None:
        """Raise UserError if the sources have too few tokens for a run of `tokens`, unless they may repeat."""
        for stream, share in zip(self.streams, self.shares, strict=True):
            if not self.repeat and tokens * share >= stream.length:
                raise UserError(
                    f"data: the stages need {round(tokens * share):,} tokens of {stream.label}, which has "
                    f"{stream.length:,} beside the held-out ones; train on fewer tokens, add sources, or set "
                    "data.repeat: true"
                )

    def take(self, rows: int, length: int) -> Rows:
        """The next `rows` rows of `length` tokens. Advances the state."""
        ids = np.empty((rows, length + 1), dtype=np.int64)
        scored = np.empty((rows, length + 1), dtype=bool)
        for row in range(rows):
            taken = sum(self.state) + length
            behind = [share * taken - own for share, own in zip(self.shares, self.state, strict=True)]
            index = int(np.argmax(behind))
            ids[row], scored[row] = self.streams[index].read(self.state[index], length + 1)
            self.state[index] += length
            if self.begin is not None and ids[row, 0] != self.begin:  # a row from the middle of a document
                ids[row], scored[row] = np.roll(ids[row], 1), np.roll(scored[row], 1)
                ids[row, 0], scored[row, :2] = self.begin, False
        return make_rows(ids, scored, self.separator, self.isolate)


def make_rows(ids: np.ndarray, scored: np.ndarray, separator: int, isolate: bool) -> Rows:
    """Rows from ids and scored [R, L + 1], whose last column serves only as a label."""
    inputs, targets = ids[:, :-1], ids[:, 1:]
    length = inputs.shape[1]
    ends = inputs == separator
    positions = np.broadcast_to(np.arange(length), inputs.shape)
    if isolate:
        begins = np.concatenate([np.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)
        positions = positions - np.maximum.accumulate(np.where(begins, positions, 0), axis=1)
    labels = np.where(scored[:, 1:] & ~ends, targets, -100)
    return Rows(torch.from_numpy(inputs.copy()), torch.from_numpy(positions.copy()), torch.from_numpy(labels))


def split_streams(
    corpora: Sequence[Corpus], holdout_tokens: int, seed: int, shuffle: bool
) -> tuple[list[Stream], list[Stream]]:
    """The training streams and the held-out streams.

    The last documents of each corpus are held out, together `holdout_tokens` in proportion to the weights. Raises
    UserError if a corpus has too few documents.
    """
    total = sum(corpus.weight for corpus in corpora)
    training, held_out = [], []
    for corpus in corpora:
        wanted = holdout_tokens * corpus.weight / total
        documents = len(corpus.starts) - 1
        first_held = int(np.searchsorted(corpus.starts, corpus.starts[-1] - wanted, side="right")) - 1
        first_held = documents if holdout_tokens == 0 else min(first_held, documents - 1)
        if first_held < 1:
            remedy = "lower data.holdout_tokens" if documents > 1 else "split it, or set data.holdout_tokens=0"
            raise UserError(
                f"data: {corpus.label} has {documents} documents, {int(corpus.starts[-1]):,} tokens: too few to "
                f"hold out {round(wanted):,} tokens, and no document is divided; {remedy}"
            )
        training.append(Stream(corpus, 0, first_held, seed, shuffle))
        if first_held < documents:
            held_out.append(Stream(corpus, first_held, documents, seed, shuffle=False))
    return training, held_out
