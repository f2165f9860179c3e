"""Reads the documents of a text file; every option that takes text supports the same formats."""

import gzip
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ..errors import UserError

KINDS = (".txt", ".md", ".jsonl", ".json", ".parquet")
COMPRESSED: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
GIVE = "give a .txt, .jsonl or .parquet file"


def read_documents(path: Path, where: str, limit: int | None = None, key: str = "text") -> Iterator[str]:
    """Yields the documents of a file in order, reading it as far as they are consumed.

    `.txt` and `.md` files are one document. `.jsonl` and `.json` files have one JSON object per line, with the text
    under `key`. `.parquet` files have a column `key`. All but the last may end in `.gz` or `.xz` and are decompressed.

    Args:
        where: how error messages name the file, such as '--text corpus.jsonl'.
        limit: largest number of characters of a `.txt` or `.md` file that are read; None for all.
        key: key of a JSON object, or name of a column.

    Raises:
        UserError: the file is missing, of another kind, not UTF-8, damaged, or has no text under `key`.
    """
    compressed = path.suffix in COMPRESSED
    kind = path.with_suffix("").suffix if compressed else path.suffix
    if kind not in KINDS or (compressed and kind == ".parquet"):
        raise UserError(f"{where}: unknown kind '{path.suffix}'; {GIVE}")
    try:
        if kind == ".parquet":
            yield from _parquet(path, where, key)
        else:
            with _opened(path) as stream:
                if kind in (".txt", ".md"):
                    yield stream.read() if limit is None else stream.read(limit)
                else:
                    for number, line in enumerate(stream, 1):
                        if line.strip():
                            yield _json_text(line, f"{where}: line {number}", key)
    except FileNotFoundError as error:
        raise UserError(f"{where}: no such file; {GIVE}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: is not UTF-8 text ({error.reason}); convert it to UTF-8") from error
    except (OSError, EOFError, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{where}: cannot be read ({reason}); check the path") from error


def _opened(path: Path) -> IO[str]:
    opener = COMPRESSED.get(path.suffix, open)
    return opener(path, "rt", encoding="utf-8")  # type: ignore[no-any-return]


def _json_text(line: str, where: str, key: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}); write one object per line") from error
    text = value.get(key) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise UserError(f"{where} has no string under key '{key}'; rename the key")
    return text


def _parquet(path: Path, where: str, key: str) -> Iterator[str]:
    import pyarrow
    from pyarrow import parquet

    if not path.exists():
        raise FileNotFoundError(path)
    try:
        table = parquet.ParquetFile(path)
        if key not in table.schema_arrow.names:
            columns = ", ".join(table.schema_arrow.names)
            raise UserError(f"{where}: no column '{key}' (it has {columns}); rename the column")
        for batch in table.iter_batches(batch_size=256, columns=[key]):
            for value in batch.column(0).to_pylist():
                if not isinstance(value, str):
                    raise UserError(f"{where}: column '{key}' holds {type(value).__name__}; give strings")
                yield value
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{where}: not a parquet file ({error}); check the file") from error
