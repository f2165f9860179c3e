"""Reads the documents of one data source in stored order, from local files or from the Hub."""

from __future__ import annotations

import io
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deltanet_hf.data.text_files import TextFile, files_in, open_file, text_format
from deltanet_hf.errors import UserError, one_line
from deltanet_recipes.schema_sections import Source

TEXT_PIECE = 8000  # smallest number of characters of a document that is cut from a plain text file


@dataclass(frozen=True)
class Document:
    """A text (str, or None where a row has none) or a chat (list of messages), and its value under `group_key`."""

    content: Any
    group: str | None = None


def documents(source: Source) -> Iterator[Document]:
    """The documents of a source.

    Raises UserError if the source cannot be read. Sources of token ids are read by `token_array`.
    """
    if source.hub is not None:
        yield from _from_hub(source)
        return
    for path in files_in(Path(str(source.path))):
        yield from _from_file(path, source)


def _from_file(path: Path, source: Source) -> Iterator[Document]:
    key_option = "text_key" if source.messages_key is None else "messages_key"
    file = TextFile(path, key=_key(source), key_option=key_option)
    if source.group_key is not None:
        groups = TextFile(path, key=source.group_key, key_option="group_key")
        for content, group in zip(file.values(), groups.values(), strict=True):
            yield Document(content, _name(group))
    elif source.messages_key is not None:
        yield from map(Document, file.values())
    else:
        cut = text_format(file.path) == "text"
        for text in file.documents():
            yield from map(Document, _split_text(text) if cut else (text,))


def token_array(source: Source) -> np.ndarray:
    """The token ids [N] of a .npy, .npy.gz or .npy.xz source, of an integer dtype."""
    path = Path(str(source.path))
    try:
        with open_file(path) as file:
            array = np.load(io.BytesIO(file.read()), allow_pickle=False)
    except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"{path}: not a NumPy array of token ids ({error})") from None
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"{path}: expected one dimension of integers, got shape {array.shape}, dtype {array.dtype}")
    return array


def _split_text(text: str) -> Iterator[str]:
    """Cut a long text between paragraphs into documents, so that some can be held out and their order can change."""
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


def _name(group: Any) -> str | None:
    """A document whose group is null is one of its own."""
    return None if group is None else str(group)


def _from_hub(source: Source) -> Iterator[Document]:
    from datasets import load_dataset

    key = _key(source)
    try:
        for row in load_dataset(str(source.hub), source.name, split=source.split, streaming=source.streaming):
            for option, name in (("text_key", key), ("group_key", source.group_key)):
                if name is not None and name not in row:
                    raise UserError(
                        f"data source {source.hub}: no field {name!r}; it has {', '.join(row)}; set {option}"
                    )
            yield Document(row[key], None if source.group_key is None else _name(row[source.group_key]))
    except UserError:
        raise
    except Exception as error:  # The Hub client's errors for data sets that it cannot get share no base class.
        raise UserError(f"data source {source.hub}: cannot be read: {one_line(error)}") from None
