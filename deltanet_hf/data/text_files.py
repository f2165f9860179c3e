"""The one reader of text files, behind every `--text` option and every `sources.path` of a recipe.

The name of a file decides its format: plain text (.txt, .md, .tokens, .raw), JSON lines (.jsonl, .json; one value per
line) or Parquet. Plain text and JSON lines may be compressed (.gz, .xz). All text is UTF-8.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from deltanet_hf.errors import UserError, one_line

FORMATS = ".txt, .md, .jsonl (each also as .gz or .xz) or .parquet"
LONGEST_LINE = 1 << 28  # characters; a longer line of JSON is no document but would be held in memory all the same
PIECE = 1 << 20  # characters read at once
PARQUET_ROWS = 256  # rows decoded at once
_SUFFIXES: dict[str, Literal["text", "jsonl", "parquet"]] = {
    ".txt": "text",
    ".md": "text",
    ".tokens": "text",
    ".raw": "text",
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
_COMPRESSED = (".gz", ".xz")
_UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error)
_MISSING = object()


def plain_suffix(path: Path) -> str:
    """The suffix of a file's name, without the one of its compression: `.jsonl` for `a.jsonl.xz`."""
    return Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix


def text_format(path: Path) -> Literal["text", "jsonl", "parquet"] | None:
    """The format of a file by its name, or None for a name that this module does not know."""
    if path.suffix in _COMPRESSED and plain_suffix(path) == ".parquet":
        return None
    return _SUFFIXES.get(plain_suffix(path))


def open_file(path: Path) -> IO[bytes]:
    """Open a file for reading bytes, through gzip or xz if its name ends in .gz or .xz."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".xz":
        return lzma.open(path, "rb")
    return open(path, "rb")


def files_in(path: Path) -> list[Path]:
    """All files in a folder and its folders, links followed, in alphabetical order; of a file, itself."""
    inner = (Path(folder, name) for folder, _, names in os.walk(path, followlinks=True) for name in names)
    return sorted(file for file in inner if file.is_file()) if path.is_dir() else [path]


@dataclass(frozen=True)
class TextFile:
    """A text file and how errors speak of it. Every method raises UserError in one line: file, key, remedy.

    Args:
        path: the file.
        key: key of a JSON line, or column of a Parquet file, that holds the text. Plain text has no keys.
        option: where the user named the file, `--text` for example; errors begin with it.
        key_option: the setting that chooses `key`, if there is one; errors about the key name it as the remedy.
    """

    path: Path
    key: str = "text"
    option: str = ""
    key_option: str = ""

    def documents(self, max_characters: int | None = None) -> Iterator[str]:
        """The documents in stored order: the strings under `key`, or the whole of a plain text file.

        Null values are skipped. With `max_characters`, reading ends when the documents together have that many; the
        last one is cut. Raises UserError also if no document has any text.
        """
        self._check_format()
        left = max_characters
        any_text = False
        for place, value in self._values(max_characters):
            if value is None:
                continue
            if not isinstance(value, str):
                raise self._error(f"{place} has no string under key {self.key!r}; {self._key_remedy}")
            document = value if left is None else value[:left]
            any_text = any_text or bool(document.strip())
            yield document
            if left is not None:
                left -= len(document)
                if left <= 0:
                    break
        if not any_text:
            raise self._error("holds no text; give a file with at least a few pages")

    def values(self) -> Iterator[Any]:
        """As `documents`, but every value under `key` as it is stored, of any type (lists of chat messages)."""
        self._check_format()
        for place, value in self._values(None):
            if value is _MISSING:
                raise self._error(f"{place} has no key {self.key!r}; {self._key_remedy}")
            yield value

    def records(self) -> Iterator[Any]:
        """Whole records: the value of each JSON line, a dict per Parquet row, else all text of the file.

        A name of unknown format counts as plain text here.
        """
        for _, record in self._records(None, None):
            yield record

    def _check_format(self) -> None:
        if text_format(self.path) is None:
            raise self._error(f"unknown kind {self.path.suffix!r}; give a file of the kinds {FORMATS}")

    def _values(self, max_characters: int | None) -> Iterator[tuple[str, Any]]:
        """(place in the file, value under the key or _MISSING) of each record."""
        plain = text_format(self.path) == "text"
        for place, record in self._records(max_characters, self.key):
            yield place, record if plain else record.get(self.key, _MISSING) if isinstance(record, dict) else _MISSING

    def _records(self, max_characters: int | None, column: str | None) -> Iterator[tuple[str, Any]]:
        kind = text_format(self.path)
        try:
            if kind == "parquet":
                yield from self._parquet(column)
            else:
                with open_file(self.path) as file:
                    stream = io.TextIOWrapper(file, encoding="utf-8")
                    if kind == "jsonl":
                        yield from self._json_lines(stream)
                    else:
                        yield "the file", "".join(_pieces(stream, max_characters))
        except FileNotFoundError:
            raise self._error(f"no such file; give a file of the kinds {FORMATS}") from None
        except UnicodeDecodeError as error:
            raise self._error(f"is not UTF-8 text ({error.reason}); convert it to UTF-8") from None
        except _UNREADABLE as error:
            raise self._error(f"cannot be read ({one_line(error)}); check the file") from None

    def _json_lines(self, stream: io.TextIOWrapper) -> Iterator[tuple[str, Any]]:
        number = 0
        while line := stream.readline(LONGEST_LINE):
            number += 1
            if len(line) == LONGEST_LINE:
                raise self._error(f"line {number} has {LONGEST_LINE} characters or more; write one document per line")
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if "\\u" in line:  # an escape may be half of a character, which no tokenizer takes
                    json.dumps(record, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                raise self._error(f"line {number} is not Unicode text ({error.reason}); leave it out") from None
            except (ValueError, RecursionError) as error:
                raise self._error(f"line {number} is not JSON ({error}); write one object per line") from None
            yield f"line {number}", record

    def _parquet(self, column: str | None) -> Iterator[tuple[str, Any]]:
        import pyarrow
        from pyarrow import parquet

        if not self.path.exists():
            raise FileNotFoundError(self.path)
        try:
            table = parquet.ParquetFile(self.path)
            names = table.schema_arrow.names
            if column is not None and column not in names:
                raise self._error(f"no column {column!r} (it has {', '.join(names)}); {self._key_remedy}")
            number = 0
            for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=None if column is None else [column]):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
        except pyarrow.ArrowInvalid as error:
            raise self._error(f"not a parquet file ({one_line(error)}); check the file") from None

    @property
    def _key_remedy(self) -> str:
        return f"set {self.key_option}" if self.key_option else f"rename the key to {self.key!r}"

    def _error(self, message: str) -> UserError:
        return UserError(f"{self.option} {self.path}: {message}".strip())


def _pieces(stream: io.TextIOWrapper, most: int | None) -> Iterator[str]:
    """At most so many characters of a stream, piece by piece: one read takes all the memory that it may need."""
    left = most
    while piece := stream.read(PIECE if left is None else min(PIECE, left)):
        yield piece
        left = None if left is None else left - len(piece)
