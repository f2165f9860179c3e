"""Rows of results: the files that keep them, and the loop that measures those that a file lacks.

A row is a JSON object: labels, which say what was measured, and figures, or `error` in place of those that could not be
had. Every command of this package writes a row as soon as it is measured, and continues a file that lacks some.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import lzma
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from deltanet_hf.errors import QualityError, UserError, one_line
from deltanet_hf.safe_write import write_atomically

Row = dict[str, Any]
ERROR_LENGTH = 300  # characters of an error in a row


class RowFile:
    """A results file. Each added row is on the disk at once, whole; several processes may add theirs.

    Args:
        path: JSON, a list of rows; with a `head` an object of what all rows share, its rows under `rows`. Compressed if
            the name ends in .xz.
        key: the labels; a row replaces an earlier one that has the same.
        fresh: whether the rows that the file has now are dropped when the first one is added.
        arranged: gives the rows as they are written, in order and with columns that follow from several.
    """

    def __init__(
        self,
        path: Path,
        key: Sequence[str] = ("run",),
        head: Row | None = None,
        fresh: bool = False,
        arranged: Callable[[list[Row]], list[Row]] = list,
    ) -> None:
        self.path, self._key, self._head, self._fresh, self._arranged = path, key, head, fresh, arranged
        self._compressed = path.suffix == ".xz"

    def rows(self) -> list[Row]:
        """All rows. Raises UserError if the file holds something else."""
        if self._fresh or not self.path.is_file():
            return []
        try:
            data = self.path.read_bytes()
            found = json.loads(lzma.decompress(data) if self._compressed else data)
            rows = found if self._head is None else found["rows"]
        except (ValueError, KeyError, TypeError, lzma.LZMAError):
            rows = None
        if not isinstance(rows, list):
            raise UserError(f"{self.path}: not a file of this command; give another")
        return rows

    def find(self, labels: Row) -> Row | None:
        """The row with these labels."""
        return next((row for row in self.rows() if self._same(row, labels)), None)

    def add(self, row: Row) -> None:
        """Add a row at the end."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            rows = self._arranged([*(old for old in self.rows() if not self._same(old, row)), row])
            data = self._text(rows).encode()
            write_atomically(self.path, lzma.compress(data) if self._compressed else data)
            self._fresh = False
        finally:
            os.close(folder)

    def _same(self, row: Row, labels: Row) -> bool:
        return all(row.get(name) == labels.get(name) for name in self._key)

    def _text(self, rows: list[Row]) -> str:
        if self._head is None:
            return json.dumps(rows, indent=1) + "\n"
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        return f'{json.dumps(self._head, indent=1)[:-2]},\n "rows": [\n  {lines}\n ]\n}}\n'


def fill(file: RowFile, labels: Iterable[Row], measure: Callable[[Row], Row], minutes: float | None = None) -> None:
    """Measure the rows that `file` lacks, in order, and print each; begin none after so many minutes.

    A row whose measurement raises gets the error. One with the key `unfinished` is measured again by the next call.
    """
    end = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    for row in labels:
        before = file.find(row)
        if before is not None and "unfinished" not in before:
            continue
        if time.monotonic() >= end:
            print("the time is over; the file lacks rows", flush=True)
            return
        try:
            row = row | measure(row)
        except Exception as error:
            row = row | {"error": described(error)}
        file.add(row)
        print(json.dumps(row), flush=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # ends the run if an error made the device unusable
            torch.cuda.empty_cache()


def described(error: BaseException) -> str:
    """One line about an error; of those that are not our own, with their class."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    text = one_line(error)
    return (text if isinstance(error, UserError | QualityError) else f"{type(error).__name__}: {text}")[:ERROR_LENGTH]


def machine(*packages: str) -> dict[str, str]:
    """The device, and the versions of Python and of packages, that figures depend on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    versions = {"python": platform.python_version()}
    for name in ("torch", *packages):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {"device": device, **versions}


def _processor() -> str:
    """The name of the CPU, as Linux has it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
