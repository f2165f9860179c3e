"""Documents of one source, in order, from whatever it is stored in."""

from __future__ import annotations

import gzip
import io
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from deltanet_hf.errors import UserError
from deltanet_recipes.config import file_kind
from deltanet_recipes.schema import Source

UNREADABLE = (OSError, EOFError, ValueError, lzma.LZMAError)  # what broken archives, encodings and Parquet raise
TEXT_PIECE = 8000  # characters in a document cut from a .txt file


def documents(source: Source) -> Iterator[Any]:
    """Texts (str) or chats (list of messages) of a source that is not a token array, in stored order."""
    # The Hub client has no common base class for "cannot get it".
    expected = UNREADABLE if source.hub is None else Exception
    try:
        yield from _stored(source)
    except UserError:
        raise
    except expected as error:
        name = source.path or f"data source {source.hub}"
        raise UserError(f"{name}: cannot be read: {' '.join(str(error).split())}") from None


def _stored(source: Source) -> Iterator[Any]:
    if source.hub is not None:
        yield from _from_hub(source)
        return
    path = Path(str(source.path))
    kind = file_kind(source)
    if kind == "txt":
        with open_file(path) as file:
            yield from _split_text(io.TextIOWrapper(file, encoding="utf-8").read())
    elif kind == "jsonl":
        yield from _from_jsonl(path, source)
    elif kind == "parquet":
        import pyarrow.parquet as parquet

        key = _key(source)
        table = parquet.ParquetFile(path)
        if key not in table.schema_arrow.names:
            raise UserError(f"{path}: no column {key!r}; it has {', '.join(table.schema_arrow.names)}; set text_key")
        for batch in table.iter_batches(columns=[key]):
            yield from batch.column(0).to_pylist()


def token_array(source: Source) -> np.ndarray:
    """The ids of a .npy source, one dimension, integers."""
    path = Path(str(source.path))
    with open_file(path) as file:
        try:
            array = np.load(io.BytesIO(file.read()), allow_pickle=False)
        except UNREADABLE as error:
            raise UserError(f"{path}: not a NumPy array of token ids ({error})") from None
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"{path}: expected one dimension of integers, got shape {array.shape}, dtype {array.dtype}")
    return array


def open_file(path: Path) -> IO[bytes]:
    """Open for reading, through gzip or xz when the name says so."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".xz":
        return lzma.open(path, "rb")
    return open(path, "rb")


def _split_text(text: str) -> Iterator[str]:
    """A long text as documents of whole paragraphs, so that some can be held out and their order can change."""
    piece: list[str] = []
    size = 0
    for paragraph in text.split("\n\n"):
        piece.append(paragraph)
        size += len(paragraph)
        if size >= TEXT_PIECE:
            yield "\n\n".join(piece)
            piece, size = [], 0
    if size:
        yield "\n\n".join(piece)


def _key(source: Source) -> str:
    return source.messages_key or source.text_key


def _from_jsonl(path: Path, source: Source) -> Iterator[Any]:
    key = _key(source)
    with open_file(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}: line {number} is not JSON ({error})") from None
            if not isinstance(record, dict) or key not in record:
                raise UserError(f"{path}: line {number} has no key {key!r}; set text_key or messages_key")
            yield record[key]


def _from_hub(source: Source) -> Iterator[Any]:
    from datasets import load_dataset

    key = _key(source)
    for row in load_dataset(str(source.hub), source.name, split=source.split, streaming=source.streaming):
        if key not in row:
            raise UserError(f"data source {source.hub}: no field {key!r}; it has {', '.join(row)}; set text_key")
        yield row[key]
