"""Finds training documents that share 13 tokens in a row with an evaluation text.

The length follows GPT-3 (Brown et al. 2020, appendix C), which compares 13 words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from deltanet_hf.data.text_files import TextFile, files_in, plain_suffix
from deltanet_recipes.data.sources import token_array
from deltanet_recipes.schema_sections import Source

GRAM = 13
_BATCH = 1024  # strings that are tokenised in one call
# One odd 64-bit multiplier per place of the n-gram: equal n-grams hash equal, others collide with 2^-64.
_MULTIPLIERS = np.random.default_rng(13).integers(1, 1 << 63, size=GRAM, dtype=np.uint64) * 2 + 1


class Contamination:
    """The hashed 13-grams of evaluation files. Nothing is read before the first document is compared.

    Args:
        files: evaluation files, and folders, which stand for all files in them.
        known: the n-grams of other files, which are not read again.
    """

    def __init__(
        self, files: Sequence[str], tokenizer: PreTrainedTokenizerBase, known: Contamination | None = None
    ) -> None:
        self._own, self._tokenizer, self._before = list(files), tokenizer, known
        self._files: list[str] = [*(known._files if known else ()), *files]
        self.names = list(dict.fromkeys(Path(name).name for name in self._files))

    @property
    def fingerprint(self) -> str:
        """Changes with the names, sizes and times of the files."""
        paths = [path for name in self._files for path in files_in(Path(name))]
        stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        return hashlib.sha256(repr(stats).encode()).hexdigest()

    def touched(self, ids: np.ndarray) -> list[str]:
        """The evaluation texts with which a document [N] of token ids shares a 13-gram.

        A text is a given file, or a file or folder that lies directly in a given folder.
        """
        grams = _grams(ids)
        grams = grams[_contains(self._known, grams)]
        return [name for name, known in self._by_text.items() if _contains(known, grams).any()] if grams.size else []

    @cached_property
    def _by_text(self) -> dict[str, np.ndarray]:
        """Name of a text -> its sorted n-grams."""
        found = dict(self._before._by_text) if self._before else {}
        for given in map(Path, self._own):
            for entry in sorted(given.iterdir()) if given.is_dir() else [given]:
                parts = [_grams(ids) for path in files_in(entry) for ids in _evaluation_ids(path, self._tokenizer)]
                name = f"{entry.parent.name}/{entry.name}"
                found[name] = np.unique(np.concatenate([found.get(name, np.empty(0, dtype=np.uint64)), *parts]))
        return found

    @cached_property
    def _known(self) -> np.ndarray:
        return np.unique(np.concatenate([np.empty(0, dtype=np.uint64), *self._by_text.values()]))


def _contains(known: np.ndarray, grams: np.ndarray) -> np.ndarray:
    """[n] bool: which of the n-grams [n] are among the sorted ones."""
    if not known.size:
        return np.zeros(len(grams), dtype=bool)
    found: np.ndarray = known[np.searchsorted(known, grams).clip(max=len(known) - 1)] == grams
    return found


def _grams(ids: np.ndarray) -> np.ndarray:
    """The hashes [N - 12] uint64 of the 13-grams of ids [N]."""
    if len(ids) < GRAM:
        return np.empty(0, dtype=np.uint64)
    shifted = np.asarray(ids).astype(np.uint64) + np.uint64(1)
    count = len(ids) - GRAM + 1
    hashes = np.zeros(count, dtype=np.uint64)
    for place in range(GRAM):
        hashes += shifted[place : place + count] * _MULTIPLIERS[place]
    return hashes


def _evaluation_ids(path: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[np.ndarray]:
    """Token ids of every string in an evaluation file: all strings of a record, or the text of a file without records.

    Files of unknown kinds are read as text, because evaluation texts have many suffixes.
    """
    if plain_suffix(path) == ".npy":
        yield token_array(Source(path=str(path)))
        return
    texts = (text for record in TextFile(path, option="data.decontaminate:").records() for text in _strings(record))
    while batch := list(islice(texts, _BATCH)):
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            yield np.array(ids, dtype=np.int64)


def _strings(value: Any) -> Iterator[str]:
    """Every string inside a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
