"""The losses of restricted models: answer NLL of recall probes, and KL from the teacher on running text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deltanet_hf.data import prefix_ids

from .probes import SelectionProbe, haystack, selection_probes

KL_STRIDE = 8  # every 8th position of running text is compared: neighbours see nearly the same context


class Objective(ABC):
    """Rows of tokens, and losses in one or several parts.

    Attributes:
        names: of the parts.
        ids: [N, T] int64.
        positions: [R] int64, those whose logits `sums` reads.
    """

    names: tuple[str, ...]
    ids: Tensor
    positions: Tensor

    @abstractmethod
    def sums(self, logits: Tensor, start: int) -> Tensor:
        """Sums [P] float32 of the loss by part, for rows `start` and following.

        Args:
            logits: [B, R, V] of these rows.
        """

    @abstractmethod
    def counts(self) -> Tensor:
        """Numbers [P] of the terms in the sums over all rows."""


class AnswerLoss(Objective):
    """Negative log-likelihood of the answers of recall probes, in nats per token; a part per format."""

    def __init__(self, probes: Sequence[SelectionProbe]) -> None:
        self.probes = list(probes)
        self.names = tuple(dict.fromkeys(probe.format for probe in probes))
        self.ids = torch.tensor([probe.ids for probe in probes])
        # The logits at position p - 1 predict the token at p.
        first = min(begin for probe in probes for begin, _ in probe.answers) - 1
        self.positions = torch.arange(first, self.ids.shape[1])
        terms = [
            (row, place, self.names.index(probe.format))
            for row, probe in enumerate(probes)
            for begin, end in probe.answers
            for place in range(begin, end)
        ]
        self.rows, self.places, self.parts = torch.tensor(terms).unbind(1)

    @classmethod
    def of_texts(cls, tokenizer: Any, length: int, count: int, window: int, seed: int) -> AnswerLoss:
        """`count` probes of each format in the shipped texts; see `selection_probes`."""
        return cls(selection_probes(tokenizer, haystack(tokenizer), length, count, window, seed))

    def sums(self, logits: Tensor, start: int) -> Tensor:
        mine = (self.rows >= start) & (self.rows < start + len(logits))
        rows, places, parts = self.rows[mine], self.places[mine], self.parts[mine]
        targets = self.ids[rows, places].to(logits.device)
        first = int(self.positions[0])
        chosen = logits[(rows - start).to(logits.device), (places - 1 - first).to(logits.device)].float()
        by_part = F.one_hot(parts, len(self.names)).float().to(logits.device)
        return F.cross_entropy(chosen, targets, reduction="none") @ by_part

    def counts(self) -> Tensor:
        return torch.bincount(self.parts, minlength=len(self.names)).float()

    def only(self, names: Sequence[str]) -> AnswerLoss:
        """The probes of these formats."""
        return AnswerLoss([probe for probe in self.probes if probe.format in names])

    def thinned(self, step: int) -> AnswerLoss:
        """Every `step`-th probe of each format."""
        by_format = [[probe for probe in self.probes if probe.format == name] for name in self.names]
        return AnswerLoss([probe for probes in by_format for probe in probes[::step]])


class TextKL(Objective):
    """KL(teacher || restricted model) in nats per token, on every 8th of the last positions of running text.

    Attributes:
        teacher: the teacher's logits [R, V] of each row, which `learn` takes over.
    """

    names = ("text",)

    def __init__(self, ids: Tensor, positions: int) -> None:
        self.ids, self.positions = ids, torch.arange(ids.shape[1] - positions, ids.shape[1], KL_STRIDE)
        self.teacher: list[Tensor] = []

    @classmethod
    def of_texts(cls, tokenizer: Any, length: int, count: int, positions: int, seed: int) -> TextKL:
        """`count` rows of `length` tokens from random places of the shipped texts, each after `prefix_ids`."""
        text, prefix = haystack(tokenizer), prefix_ids(tokenizer)
        room = length - len(prefix)
        starts = np.random.default_rng(seed).integers(0, len(text) - room + 1, count)
        rows = np.stack([np.concatenate([prefix, text[start : start + room]]) for start in starts])
        return cls(torch.from_numpy(rows.astype(np.int64)), positions)

    def learn(self, logits: Tensor) -> None:
        """Takes over the teacher's logits [B, R, V] of the next rows."""
        self.teacher.extend(logits)

    def sums(self, logits: Tensor, start: int) -> Tensor:
        total = logits.new_zeros(1, dtype=torch.float32)
        for row, student in enumerate(logits):  # row by row: three copies in float32 of all would be large
            known = F.log_softmax(self.teacher[start + row].float(), -1)
            total = total + F.kl_div(F.log_softmax(student.float(), -1), known, reduction="sum", log_target=True)
        return total

    def counts(self) -> Tensor:
        return torch.tensor([float(len(self.ids) * len(self.positions))])

    def thinned(self, step: int) -> TextKL:
        """Every `step`-th row."""
        chosen = copy(self)
        chosen.ids, chosen.teacher = self.ids[::step], self.teacher[::step]
        return chosen
