"""The one function that measures a model; reports, studies and the demo say what, and choose rows and columns.

Every figure keeps its sums per window or probe (`Clusters`), so that models which were measured in different processes
can be compared item by item. The names of figures are

- loss_TEXT in nats per token, and of texts that the teacher reads too, kl_TEXT, KL(teacher || model) in nats per token,
  and top1_TEXT, the share of tokens whose most likely value is the teacher's;
- PART, the share of a part's tokens that are the most likely ones, and PART_kl. Texts with parts of the same name give
  one figure;
- PROBE, PROBE.first and PROBE.nats: the shares of answers of which greedy decoding gives all tokens and the first
  token, and the nats of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from deltanet_hf.evaluation.measures.continuations import token_budget
from deltanet_hf.evaluation.measures.probes import Probe, answer_outcomes
from deltanet_hf.evaluation.measures.relative import Clusters
from deltanet_hf.evaluation.measures.speed import sequence_bytes
from deltanet_hf.evaluation.measures.text_scores import Forward, TokenMeasures, token_measures


@dataclass(frozen=True)
class Text:
    """A text that models read.

    Attributes:
        windows: token ids [N, T] int64, with what precedes a text.
        scored: tokens at the end of each window that are measured; None for all but the first.
        block: measured tokens of a window that are one item; None for all of them.
        parts: name -> which of the measured tokens are measured apart, too [N, scored] bool.
        compared: whether the teacher reads it too.
    """

    windows: Tensor
    scored: int | None = None
    block: int | None = None
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)
    compared: bool = True


def repeated(segments_NT: Tensor) -> Text:
    """Segments [N, T] int64 twice in a row, of which the second copies are measured.

    Its loss shows verbatim recall over T tokens: that of a model which can copy is almost 0.
    """
    return Text(torch.cat([segments_NT, segments_NT], dim=1), segments_NT.shape[1], compared=False)


@dataclass(frozen=True)
class Settings:
    """The choice of figures: those whose inputs are given.

    Attributes:
        texts: name -> text.
        teacher: that other models are compared with.
        probes: name -> probes.
        bytes_at: tokens of the sequence whose cache is measured.
    """

    texts: Mapping[str, Text] = field(default_factory=dict)
    teacher: Forward | None = None
    probes: Mapping[str, Sequence[Probe]] = field(default_factory=dict)
    bytes_at: int | None = None

    def without_facts(self) -> Settings:
        """The control: the probes alone, without the facts that they ask for."""
        probes = {name: [probe.without_facts() for probe in probes] for name, probes in self.probes.items()}
        return Settings(probes=probes)


@dataclass(frozen=True)
class Measured:
    """Bytes of a sequence, and name of a figure -> its clusters."""

    bytes: int
    clusters: dict[str, Clusters]

    @property
    def probes(self) -> list[str]:
        """The names of the probes."""
        return [name for name in self.clusters if f"{name}.nats" in self.clusters]

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"bytes": self.bytes, "clusters": {name: part.to_list() for name, part in self.clusters.items()}}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Measured:
        """The inverse of `to_dict`."""
        return cls(values["bytes"], {name: Clusters.from_list(part) for name, part in values["clusters"].items()})


@torch.inference_mode()
def measure(model: PreTrainedModel, settings: Settings) -> Measured:
    """Everything that `settings` name, of a model in eval mode. The teacher itself has KL 0 and agrees with itself."""
    found: dict[str, Clusters] = {}
    parts: dict[str, list[Clusters]] = {}
    for name, text in settings.texts.items():
        tokens = _of_text(model, text, settings.teacher)
        found[f"loss_{name}"] = _items(tokens.losses, text.block)
        if tokens.divergences is not None and tokens.agreements is not None:
            found[f"kl_{name}"] = _items(tokens.divergences, text.block)
            found[f"top1_{name}"] = _items(tokens.agreements, text.block)
        for part, where in text.parts.items():
            parts.setdefault(part, []).append(clusters_where(tokens.hits, where))
            if tokens.divergences is not None:
                parts.setdefault(f"{part}_kl", []).append(clusters_where(tokens.divergences, where))
    found |= {name: Clusters.joined(some) for name, some in parts.items()}
    for name, probes in settings.probes.items():
        answers = answer_outcomes(model, probes)
        for figure, values in ((name, answers.exact), (f"{name}.first", answers.first), (f"{name}.nats", answers.nats)):
            found[figure] = Clusters.of(values, answers.owners)
    return Measured(0 if settings.bytes_at is None else sequence_bytes(model, settings.bytes_at), found)


def clusters_where(values: np.ndarray, where: np.ndarray) -> Clusters:
    """Sums per window of `values` [N, S] over the tokens where `where` [N, S] holds."""
    return Clusters((values * where).sum(axis=1, dtype=np.float64), where.sum(axis=1))


def _of_text(model: PreTrainedModel, text: Text, teacher: Forward | None) -> TokenMeasures:
    teacher = teacher if text.compared else None
    length, windows = text.windows.shape[1], text.windows.to(model.device)
    # Half of the budget, because the logits of model and teacher exist at the same time.
    rows = max(1, token_budget(model) // (2 * length))
    scored, vocabulary = text.scored or length - 1, model.config.get_text_config().vocab_size
    if teacher is not model:
        return token_measures(model, windows, scored, rows, vocabulary, teacher)
    tokens = token_measures(model, windows, scored, rows, vocabulary)
    return replace(tokens, divergences=np.zeros_like(tokens.losses), agreements=np.ones_like(tokens.losses))


def _items(values: np.ndarray, block: int | None) -> Clusters:
    """Values [N, S] of tokens, a cluster per window or per `block` tokens of one."""
    count, scored = values.shape
    starts = np.arange(0, scored, block or scored)
    sums = np.add.reduceat(values.astype(np.float64), starts, axis=1)
    return Clusters(sums.flatten(), np.tile(np.diff([*starts, scored]), count))
