"""Measures hybrids by bytes, KL at several lengths, recall probes and recall in running text."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from deltanet_hf.data import prefix_ids, with_prefix
from deltanet_hf.evaluation.measures.continuations import token_budget
from deltanet_hf.evaluation.measures.measure import Measured, Settings, Text, clusters_where, measure, repeated
from deltanet_hf.evaluation.measures.relative import Clusters
from deltanet_hf.evaluation.tasks.text_windows import windows
from measuring.study.bigram_recall import (
    CONTEXT,
    FAR,
    bigram_distances,
    bigram_parts,
    in_range,
    short_context_hits,
)
from measuring.study.recall_cells import recall_cells

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


class HybridMeasure:
    """Measures models against one teacher.

    Args:
        arrays: folder with wt2.npy, heldwiki.npy, wiki_long.npy and novels.npy (token ids).
        limit: largest number of windows per text and of probes per cell; None for no limit.
    """

    def __init__(
        self,
        arrays: Path,
        teacher: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        limit: int | None = None,
    ) -> None:
        self.teacher = teacher
        longest = int(teacher.config.get_text_config().max_position_embeddings)
        tokens = {name: np.load(arrays / f"{name}.npy").astype(np.int64) for name, _, _ in TEXTS.values()}
        self.prefix = prefix_ids(tokenizer)
        self.windows = {
            name: windows(tokens[array], size, min(count, limit or count), array in SPREAD)
            for name, (array, size, count) in TEXTS.items()
            if size <= longest
        }
        self.segments = windows(tokens["heldwiki"], SEGMENT, min(SEGMENTS, limit or SEGMENTS), spread=True)
        self.distances = {
            name: bigram_distances(self.windows[name].numpy()) for name in WITH_BIGRAMS if name in self.windows
        }
        parts = {name: bigram_parts(distances) for name, distances in self.distances.items()}
        texts = {
            name: Text(with_prefix(cut, tokenizer), cut.shape[1] - 1, parts=parts.get(name, {}))
            for name, cut in self.windows.items()
        }
        probes = recall_cells(tokenizer, tokens[HAYSTACK], longest, limit=limit)
        self.settings = Settings(texts | {"repeat": repeated(self.segments)}, teacher, probes, bytes_at=BYTES_AT)

    def __call__(self, model: PreTrainedModel) -> Measured:
        """All measures of a model; divergences are those from the teacher."""
        return measure(model, self.settings)

    def control(self) -> Measured:
        """The teacher without what is to be recalled: probes without facts, bigrams with a short context."""
        found, teacher, parts = measure(self.teacher, self.settings.without_facts()), self.teacher, []
        rows = token_budget(teacher) // (2 * CONTEXT)
        for name, distances in self.distances.items():
            hits = short_context_hits(teacher, self.windows[name].to(teacher.device), CONTEXT, rows, self.prefix)
            parts.append(clusters_where(hits, in_range(distances, FAR)))
        if parts:
            found.clusters["bigram"] = Clusters.joined(parts)
        return found

    def fingerprint(self) -> str:
        """Identifies the teacher's weights and everything that is measured, for figures kept in files."""
        digest = hashlib.sha256(str(self.teacher.dtype).encode())
        for parameter in self.teacher.parameters():
            digest.update(repr(parameter.double().sum().item()).encode())
        for tensor in (*self.windows.values(), self.segments):
            digest.update(tensor.numpy().tobytes())
        for name, probes in self.settings.probes.items():
            digest.update(repr((name, [(probe.ids, probe.answers, probe.facts) for probe in probes])).encode())
        return digest.hexdigest()[:16]
