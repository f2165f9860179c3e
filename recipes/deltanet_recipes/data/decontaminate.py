"""Finds training documents that share 13 tokens in a row with an evaluation text.

The length follows GPT-3 (Brown et al. 2020, appendix C), which compares 13 words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from deltanet_hf.data.text_files import TextFile, plain_suffix
from deltanet_recipes.data.sources import token_array
from deltanet_recipes.schema_sections import Source

GRAM = 13
# One odd 64-bit multiplier per place of the n-gram: equal n-grams hash equal, others collide with 2^-64.
_MULTIPLIERS = np.random.default_rng(13).integers(1, 1 << 63, size=GRAM, dtype=np.uint64) * 2 + 1


class Contamination:
    """The hashed 13-grams of the given evaluation files. A folder stands for all files in it."""

    def __init__(self, files: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.names = [Path(name).name for name in files]
        paths = [path for name in files for path in _files(Path(name))]
        grams = [_grams(ids) for path in paths for ids in _evaluation_ids(path, tokenizer)]
        self._known = np.unique(np.concatenate([np.empty(0, dtype=np.uint64), *grams]))
        self.fingerprint = hashlib.sha256(self._known.tobytes()).hexdigest()

    def touches(self, ids: np.ndarray) -> bool:
        """Whether a document [N] of token ids shares a 13-gram with any evaluation text."""
        grams = _grams(ids)
        if not grams.size or not self._known.size:
            return False
        place = np.searchsorted(self._known, grams).clip(max=len(self._known) - 1)
        return bool((self._known[place] == grams).any())


def _files(path: Path) -> list[Path]:
    return sorted(inner for inner in path.rglob("*") if inner.is_file()) if path.is_dir() else [path]


def _grams(ids: np.ndarray) -> np.ndarray:
    """The hashes [N - 12] uint64 of the 13-grams of ids [N]."""
    if len(ids) < GRAM:
        return np.empty(0, dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(ids).astype(np.uint64) + np.uint64(1), GRAM)
    hashes = np.zeros(len(windows), dtype=np.uint64)
    for place in range(GRAM):
        hashes += windows[:, place] * _MULTIPLIERS[place]
    return hashes


def _evaluation_ids(path: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[np.ndarray]:
    """Token ids of every string in an evaluation file: all strings of a record, or the text of a file without records.

    Files of unknown kinds are read as text, because evaluation texts have many suffixes.
    """
    if plain_suffix(path) == ".npy":
        yield token_array(Source(path=str(path)))
        return
    for record in TextFile(path, option="data.decontaminate:").records():
        for text in _strings(record):
            yield np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)


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
