"""Reads calibration text from txt, jsonl or parquet files, cuts it into sequences and splits off a held-out part."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltanet_hf.data import prefix_ids, with_prefix
from deltanet_hf.errors import UserError

SEQUENCE_LENGTH = 512
HELD_OUT_TOKENS = 4096  # at most, and never more than the calibration tokens
HELD_OUT_SHARE = 0.2  # share of the text, at its end, from which held-out sequences are drawn
CHARS_PER_TOKEN = 24  # characters read per token: more than any tokenizer uses, far less than a corpus has
SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class CalibrationText:
    """Token ids [n, T] int64 for calibration and, from another part of the text, for measurement."""

    calibration: Tensor
    held_out: Tensor
    source: str
    sha256: str  # hash of the characters that were read


def read_text(path: Path, needed_tokens: int) -> list[str]:
    """Reads the documents of a file in order, until they suffice for `needed_tokens` tokens.

    A `.txt` file is one document; a `.jsonl` file has one object per line with the key `text`; a `.parquet` file has a
    column `text`.

    Raises:
        UserError: the file is missing, of another kind, unreadable or empty.
    """
    budget = max(1_000_000, CHARS_PER_TOKEN * needed_tokens)
    documents: list[str] = []
    try:
        for document in _documents(path, budget):
            documents.append(document[:budget])
            budget -= len(documents[-1])
            if budget <= 0:
                break
    except FileNotFoundError as error:
        raise UserError(f"--text {path}: no such file; give a .txt, .jsonl or .parquet file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--text {path}: is not UTF-8 text ({error.reason}); convert it to UTF-8") from error
    except OSError as error:
        raise UserError(f"--text {path}: cannot be read ({error.strerror}); check the path") from error
    if not any(document.strip() for document in documents):
        raise UserError(f"--text {path}: holds no text; give a file with at least a few pages")
    return documents


def _documents(path: Path, budget: int) -> Iterator[str]:
    if path.suffix not in SUFFIXES:
        raise UserError(f"--text {path}: unknown kind '{path.suffix}'; give a .txt, .jsonl or .parquet file")
    if path.suffix == ".parquet":
        yield from _parquet(path)
    elif path.suffix in (".jsonl", ".json"):
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _json_text(path, number, line)
    else:
        with path.open(encoding="utf-8") as stream:
            yield stream.read(budget)


def _json_text(path: Path, number: int, line: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--text {path}: line {number} is not JSON ({error}); write one object per line") from error
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise UserError(f"--text {path}: line {number} has no string under key 'text'; rename the key")
    return text


def _parquet(path: Path) -> Iterator[str]:
    import pyarrow
    from pyarrow import parquet

    if not path.exists():
        raise FileNotFoundError(path)
    try:
        table = parquet.ParquetFile(path)
        if "text" not in table.schema_arrow.names:
            raise UserError(
                f"--text {path}: no column 'text' (it has {', '.join(table.schema_arrow.names)}); rename the column"
            )
        for batch in table.iter_batches(batch_size=256, columns=["text"]):
            for value in batch.column(0).to_pylist():
                if not isinstance(value, str):
                    raise UserError(f"--text {path}: column 'text' holds {type(value).__name__}; give strings")
                yield value
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"--text {path}: not a parquet file ({error}); check the file") from error


def tokenise(
    documents: list[str], tokenizer: Any, calibration_tokens: int, seed: int, source: str, max_length: int
) -> CalibrationText:
    """Cuts the documents into sequences and draws calibration and held-out sequences with `seed`.

    A sequence has `min(512, max_length, calibration_tokens)` tokens. It begins with the begin-of-text token if the
    tokenizer adds one, because models trained with that token depend on it. The held-out sequences come from the last
    fifth of the text, the calibration sequences from the rest.

    Raises:
        UserError: the text is too short for `calibration_tokens`.
    """
    length = min(SEQUENCE_LENGTH, max_length, calibration_tokens)
    ids: list[int] = []
    end = tokenizer.eos_token_id
    for document in documents:
        ids.extend(tokenizer(document, add_special_tokens=False)["input_ids"])
        if end is not None:
            ids.append(end)
    wanted, held = -(-calibration_tokens // length), min(HELD_OUT_TOKENS, calibration_tokens) // length
    cut = length - len(prefix_ids(tokenizer))
    blocks = torch.tensor(ids[: len(ids) // cut * cut], dtype=torch.int64).view(-1, cut)
    blocks = with_prefix(blocks, tokenizer)
    first_held = min(len(blocks) - 1, int(len(blocks) * (1 - HELD_OUT_SHARE)))
    if first_held < wanted:
        raise UserError(
            f"--text {source}: {len(ids)} tokens are too few for --calibration-tokens "
            f"{calibration_tokens} and a "
            f"held-out fifth; give more text, or use at most {max(0, first_held) * length}"
        )
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(first_held, generator=generator)[:wanted]
    measured = first_held + torch.randperm(len(blocks) - first_held, generator=generator)[:held]
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    return CalibrationText(blocks[chosen], blocks[measured], source, digest)
