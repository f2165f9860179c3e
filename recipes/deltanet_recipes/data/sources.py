"""Reads the documents of one data source in stored order, from a local file or from the Hub."""

from __future__ import annotations

import io
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from deltanet_hf.data.text_files import TextFile, open_file, text_format
from deltanet_hf.errors import UserError, one_line
from deltanet_recipes.schema_sections import Source

TEXT_PIECE = 8000  # smallest number of characters of a document that is cut from a plain text file


def documents(source: Source) -> Iterator[Any]:
    """The texts (str, or None where a Hub row has none) or the chats (list of messages) of a source.

    Raises UserError if the source cannot be read. Sources of token ids are read by `token_array`.
    """
    if source.hub is not None:
        yield from _from_hub(source)
        return
    key_option = "text_key" if source.messages_key is None else "messages_key"
    file = TextFile(Path(str(source.path)), key=_key(source), key_option=key_option)
    if source.messages_key is not None:
        yield from file.values()
        return
    cut = text_format(file.path) == "text"
    for document in file.documents():
        yield from _split_text(document) if cut else (document,)


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


def _from_hub(source: Source) -> Iterator[Any]:
    from datasets import load_dataset

    key = _key(source)
    try:
        for row in load_dataset(str(source.hub), source.name, split=source.split, streaming=source.streaming):
            if key not in row:
                raise UserError(f"data source {source.hub}: no field {key!r}; it has {', '.join(row)}; set text_key")
            yield row[key]
    except UserError:
        raise
    except Exception as error:  # The Hub client's errors for data sets that it cannot get share no base class.
        raise UserError(f"data source {source.hub}: cannot be read: {one_line(error)}") from None
