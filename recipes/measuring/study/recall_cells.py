"""The recall probes of a comparison by bytes, few enough for every run of a study."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
from transformers import PreTrainedTokenizerBase

from deltanet_hf.evaluation.measures.probes import Probe
from deltanet_hf.evaluation.tasks.haystack import Haystack
from deltanet_hf.evaluation.tasks.prose_facts import prose_facts
from deltanet_hf.evaluation.tasks.recall_tasks import associative_recall, needles

Build = Callable[[PreTrainedTokenizerBase, Haystack, int, int], list[Probe]]
_LENGTHS = {1024: "1k", 2048: "2k", 4096: "4k", 8192: "8k", 16384: "16k", 32768: "32k"}


def _needles(tokenizer: PreTrainedTokenizerBase, haystack: Haystack, length: int, count: int) -> list[Probe]:
    return needles(tokenizer, haystack.ids, length, count)


def _pairs(tokenizer: PreTrainedTokenizerBase, haystack: Haystack, pairs: int, count: int) -> list[Probe]:
    return associative_recall(tokenizer, pairs, count)


# Name -> builder, its size (tokens or pairs), number of probes.
CELLS: dict[str, tuple[Build, int, int]] = {
    **{f"needles_{_LENGTHS[n]}": (_needles, n, count) for n, count in ((1024, 128), (2048, 128), (4096, 64))},
    **{f"prose_{_LENGTHS[n]}": (prose_facts, n, count) for n, count in ((1024, 96), (2048, 96), (4096, 48))},
    **{f"pairs_{n}": (_pairs, n, count) for n, count in ((8, 128), (32, 64), (128, 24))},
}
LONG: dict[str, tuple[Build, int, int]] = {
    f"{name}_{_LENGTHS[n]}": (build, n, count)
    for n, count in ((8192, 32), (16384, 16), (32768, 8))
    for name, build in (("needles", _needles), ("prose", prose_facts))
}
"""Cells of models with more than 8,192 positions."""


def recall_cells(
    tokenizer: PreTrainedTokenizerBase,
    haystack: np.ndarray,
    longest: int,
    names: Collection[str] | None = None,
    limit: int | None = None,
) -> dict[str, list[Probe]]:
    """The probes of cells, by their names.

    Args:
        haystack: token ids [n] of the text in which facts are hidden.
        longest: cells with longer contexts, in tokens, are left out.
        names: of the cells; None for all of a model with so long contexts.
        limit: largest number of probes per cell; None for no limit.
    """
    text = Haystack(tokenizer, haystack)
    known = CELLS | (LONG if names is not None or longest > 8192 else {})
    return {
        name: build(tokenizer, text, size, min(count, limit or count))
        for name, (build, size, count) in known.items()
        if (names is None or name in names) and (size <= longest or build is _pairs)
    }
