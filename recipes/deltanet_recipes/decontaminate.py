"""Find training documents that share a 13-gram with an evaluation text (13 tokens, as GPT-3's 13 words)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from deltanet_hf.errors import UserError
from deltanet_recipes.config import file_kind
from deltanet_recipes.schema import Source
from deltanet_recipes.sources import UNREADABLE, open_file, token_array

GRAM = 13
# One odd 64-bit multiplier per place of the n-gram: equal n-grams hash equal, others collide with 2^-64.
_MULTIPLIERS = np.random.default_rng(13).integers(1, 1 << 63, size=GRAM, dtype=np.uint64) * 2 + 1


class Contamination:
    """The hashed 13-grams of evaluation files; a folder stands for all files in it."""

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
    """[N - 12] uint64 hashes of the n-grams of ids [N]."""
    if len(ids) < GRAM:
        return np.empty(0, dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(ids).astype(np.uint64) + np.uint64(1), GRAM)
    hashes = np.zeros(len(windows), dtype=np.uint64)
    for place in range(GRAM):
        hashes += windows[:, place] * _MULTIPLIERS[place]
    return hashes


def _evaluation_ids(path: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[np.ndarray]:
    source = Source(path=str(path))
    if file_kind(source) == "npy":
        yield token_array(source)
        return
    for text in _evaluation_texts(path):
        yield np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)


def _evaluation_texts(path: Path) -> Iterator[str]:
    """Every string of a .jsonl or .parquet file, else the whole file: evaluation texts end in .tokens, .md ... too."""
    kind = file_kind(Source(path=str(path)))
    try:
        if kind == "parquet":
            import pyarrow.parquet as parquet

            for batch in parquet.ParquetFile(path).iter_batches():
                yield from _strings(batch.to_pylist())
            return
        with open_file(path) as file:
            if kind == "jsonl":
                for line in file:
                    yield from _strings(json.loads(line) if line.strip() else None)
            else:
                yield file.read().decode("utf-8")
    except UNREADABLE as error:
        raise UserError(f"data.decontaminate: {path}: cannot be read ({error})") from None


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
