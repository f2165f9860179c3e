"""Measures hybrids by bytes, KL at several lengths, recall probes and recall in running text.

All figures keep their sums per window or probe (`Clusters`), so that models which were measured in different processes
can still be compared item by item.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from deltanet_hf.data import prefix_ids
from deltanet_hf.evaluation.measures.probes import Probe, answer_outcomes
from deltanet_hf.evaluation.measures.relative import Clusters
from deltanet_hf.evaluation.measures.sequence_bytes import sequence_bytes
from deltanet_hf.evaluation.measures.text_scores import repeat_means
from measuring.study.bigram_recall import (
    CONTEXT,
    FAR,
    bigram_clusters,
    bigram_distances,
    clusters_where,
    in_range,
)
from measuring.study.generated_answers import generated_answers
from measuring.study.recall_cells import recall_cells
from measuring.study.token_measures import short_context_hits, token_measures

BYTES_AT = 2048  # tokens of the sequence whose bytes are given
# Text -> array, tokens per window, largest number of windows.
TEXTS = {
    "wt2": ("wt2", 1024, 64),
    "1k": ("heldwiki", 1024, 128),
    "wiki_4k": ("wiki_long", 4096, 24),
    "4k": ("novels", 4096, 32),
    "8k": ("novels", 8192, 16),
    "16k": ("novels", 16384, 8),
    "32k": ("novels", 32768, 6),
}
SPREAD = ("heldwiki", "wiki_long", "novels")  # arrays of many texts; of the others the first windows are taken
WITH_BIGRAMS = ("wiki_4k", "4k")
HAYSTACK = "novels"
SEGMENT, SEGMENTS = 256, 64  # of the exact repeat
GENERATED = "needles_1k"  # the cell whose answers are also generated
_TOKENS_CUDA, _TOKENS_CPU = 16384, 2048  # per forward pass of several windows that gives the logits of all positions
_LOGITS = 1 << 30  # elements of these logits: 2 GiB in bfloat16


@dataclass(frozen=True)
class Measured:
    """Bytes of a sequence of 2,048 tokens, and name of a measure -> its clusters."""

    bytes: int
    clusters: dict[str, Clusters]

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        lists = {
            name: [[round(value, 5) for value in part.sums.tolist()], part.sizes.tolist()]
            for name, part in self.clusters.items()
        }
        return {"bytes": self.bytes, "clusters": lists}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Measured:
        """The inverse of `to_dict`."""
        clusters = {name: Clusters(np.array(s), np.array(n)) for name, (s, n) in values["clusters"].items()}
        return cls(values["bytes"], clusters)


class HybridMeasure:
    """Measures models against one teacher.

    Args:
        arrays: folder with wt2.npy, heldwiki.npy, wiki_long.npy and novels.npy (token ids).
        limit: largest number of windows per text and of probes per cell; None for no limit.
        sweeps: whether to measure recall by distance and load, generated answers, and contexts of 8k tokens.
    """

    def __init__(
        self,
        arrays: Path,
        teacher: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        limit: int | None = None,
        sweeps: bool = False,
    ) -> None:
        self.teacher, self.sweeps = teacher, sweeps
        longest = int(teacher.config.get_text_config().max_position_embeddings)
        tokens = {name: np.load(arrays / f"{name}.npy").astype(np.int64) for name, _, _ in TEXTS.values()}
        self.prefix = prefix_ids(tokenizer)
        self.windows = {
            name: text_windows(tokens[array], size, min(count, limit or count), array in SPREAD).to(teacher.device)
            for name, (array, size, count) in TEXTS.items()
            if size <= longest
        }
        count = min(SEGMENTS, limit or SEGMENTS)
        self.segments = text_windows(tokens["heldwiki"], SEGMENT, count, spread=True).to(teacher.device)
        self.distances = {
            name: bigram_distances(self.windows[name].cpu().numpy()) for name in WITH_BIGRAMS if name in self.windows
        }
        self.probes = recall_cells(tokenizer, tokens[HAYSTACK], longest, sweeps, limit)

    def __call__(self, model: PreTrainedModel) -> Measured:
        """All measures of a model; divergences are those from the teacher."""
        found: dict[str, Clusters] = {}
        bigrams: list[dict[str, Clusters]] = []
        teacher = None if model is self.teacher else self.teacher
        for name, windows in self.windows.items():
            measures = token_measures(model, windows, self._rows(windows), teacher, self.prefix)
            zeros = np.zeros_like(measures.losses)
            divergences = zeros if measures.divergences is None else measures.divergences
            agreements = zeros + 1 if measures.agreements is None else measures.agreements
            measures = replace(measures, divergences=divergences)
            found[f"loss_{name}"], found[f"kl_{name}"] = _means(measures.losses), _means(divergences)
            found[f"top1_{name}"] = _means(agreements)
            if name in self.distances:
                bigrams.append(dict(bigram_clusters(measures, self.distances[name])))
        found |= {name: _joined([part[name] for part in bigrams]) for name in (bigrams[0] if bigrams else ())}
        found["loss_repeat"] = _single(repeat_means(model, self.segments, self._rows(self.segments) // 2 or 1))
        for name, probes in self.probes.items():
            found |= _probe_clusters(name, model, probes)
        if self.sweeps:
            found[f"{GENERATED}.generated"] = _single(generated_answers(model, self.probes[GENERATED]))
        return Measured(sequence_bytes(model, BYTES_AT), found)

    def control(self) -> Measured:
        """The teacher without what is to be recalled: probes without facts, bigrams with a short context."""
        found: dict[str, Clusters] = {}
        for name, probes in self.probes.items():
            found |= _probe_clusters(name, self.teacher, [probe.without_facts() for probe in probes])
        parts = []
        for name, distances in self.distances.items():
            windows = self.windows[name]
            hits = short_context_hits(self.teacher, windows, CONTEXT, self._budget() // CONTEXT, self.prefix)
            parts.append(clusters_where(hits, in_range(distances, FAR)))
        if parts:
            found["bigram"] = _joined(parts)
        return Measured(0, found)

    def fingerprint(self) -> str:
        """Identifies the teacher's weights and everything that is measured, for figures kept in files."""
        digest = hashlib.sha256(str(self.teacher.dtype).encode())
        for parameter in self.teacher.parameters():
            digest.update(repr(parameter.double().sum().item()).encode())
        for tensor in (*self.windows.values(), self.segments):
            digest.update(tensor.cpu().numpy().tobytes())
        for name, probes in self.probes.items():
            digest.update(repr((name, [(probe.ids, probe.answers, probe.facts) for probe in probes])).encode())
        return digest.hexdigest()[:16]

    def _budget(self) -> int:
        tokens = _TOKENS_CUDA if self.teacher.device.type == "cuda" else _TOKENS_CPU
        return min(tokens, _LOGITS // int(self.teacher.config.get_text_config().vocab_size))

    def _rows(self, windows: Tensor) -> int:
        return max(1, self._budget() // windows.shape[1])


def text_windows(tokens: np.ndarray, size: int, count: int, spread: bool) -> Tensor:
    """At most `count` windows [count, size] int64 without overlap: the first of a text, or spread evenly over it."""
    available = len(tokens) // size
    count = min(count, available)
    chosen = np.linspace(0, available - 1, count).round().astype(int) if spread else np.arange(count)
    return torch.from_numpy(tokens[: available * size].reshape(available, size)[chosen])


def _means(values_NT: np.ndarray) -> Clusters:
    return Clusters(values_NT.sum(axis=1, dtype=np.float64), np.full(len(values_NT), values_NT.shape[1]))


def _single(values: list[float]) -> Clusters:
    """One cluster per value."""
    return Clusters(np.asarray(values), np.ones(len(values), dtype=np.int64))


def _joined(parts: list[Clusters]) -> Clusters:
    """The clusters of several texts side by side."""
    return Clusters(np.concatenate([p.sums for p in parts]), np.concatenate([p.sizes for p in parts]))


def _probe_clusters(name: str, model: PreTrainedModel, probes: list[Probe]) -> dict[str, Clusters]:
    """NAME (exact match), NAME.first and NAME.nats, one cluster per probe."""
    outcomes = answer_outcomes(model, probes)
    return {
        name: Clusters.of(outcomes.exact, outcomes.owners),
        f"{name}.first": Clusters.of(outcomes.first, outcomes.owners),
        f"{name}.nats": Clusters.of(outcomes.nats, outcomes.owners),
    }
