"""Result files that grow row by row, within a time that is given."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from measuring.kernels.first_results import OverTime
from measuring.kernels.timing import RESULTS, write

Row = dict[str, Any]
SHAPES = [
    (16, 2048, 9, 64),
    (8, 2048, 32, 64),
    (4, 4096, 32, 128),
    (1, 4096, 32, 128),
    (1, 32768, 32, 128),
    (1, 131072, 16, 128),
]
"""B, T, heads, head size of tables that compare kernels."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that `Table` and the measurement of a row read."""
    parser.add_argument("--repeats", type=int, default=20, help="Timed calls per number, of which the median is taken.")
    parser.add_argument("--minutes", type=float, default=8, help="Start no further row after this many minutes.")
    parser.add_argument(
        "--first-seconds", type=float, default=60, help="Give up a row without its first results after these seconds."
    )
    parser.add_argument(
        "--resume", action="store_true", help="Keep the rows of the result file and add the missing ones."
    )
    parser.add_argument("--output", type=Path, help="Folder of the result file (default: the package's own).")


class Table:
    """The rows of a result file, which is written whenever one is added.

    Args:
        name: of the file.
        keys: the labels that a row of ours shares with the peer's; the label `impl` is `deltanet` or `fla` there.
        times: the columns in milliseconds that get a ratio, the peer's time divided by ours.
        notes: entries of the file beside the rows.
        options: those of `add_options`.
    """

    def __init__(
        self, name: str, keys: Sequence[str], times: Sequence[str], notes: Row, options: argparse.Namespace
    ) -> None:
        self.name, self.keys, self.times, self.notes, self.folder = name, keys, times, notes, options.output
        self._end = time.monotonic() + 60 * options.minutes
        path = (options.output or RESULTS) / name
        rows: list[Row] = json.loads(path.read_text())["rows"] if options.resume and path.exists() else []
        self.rows = [row for row in rows if "unfinished" not in row]

    def __contains__(self, labels: Row) -> bool:
        return any(all(row.get(key) == value for key, value in labels.items()) for row in self.rows)

    def fill(self, labels: Iterable[Row], measure: Callable[[Row], Row]) -> None:
        """Measure the rows that the file lacks, in order, until the time is over.

        A row whose measurement raises has the error as `failed`, and `--resume` keeps it. One without first results in
        time has `unfinished`; `--resume` measures it again and finds the kernels that are compiled by then.
        """
        for row in labels:
            if row in self:
                continue
            if time.monotonic() >= self._end:
                print("the time is over; --resume goes on", flush=True)
                return
            try:
                found = measure(row)
            except OverTime as error:
                found = {"unfinished": str(error)}
            except Exception as error:
                found = {"failed": one_line(error)}
            self.rows.append(row | found)
            print(self.rows[-1], flush=True)
            write(self.name, self.with_ratios(), self.notes, self.folder)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # ends the run if an error made the device unusable
                torch.cuda.empty_cache()

    def with_ratios(self) -> list[Row]:
        """The rows; ours with the ratios to the times of the peer with the same labels."""
        peers = {self._shared(row): row for row in self.rows if row.get("impl") == "fla"}
        return [
            row | self._ratios(row, peers.get(self._shared(row), {})) if row.get("impl") == "deltanet" else row
            for row in self.rows
        ]

    def _shared(self, row: Row) -> str:
        return json.dumps([row.get(key) for key in self.keys])

    def _ratios(self, ours: Row, peer: Row) -> Row:
        both = [name for name in self.times if name in ours and name in peer]
        return {f"{name.removesuffix('_ms')}_ratio": round(peer[name] / ours[name], 2) for name in both}


def one_line(error: BaseException) -> str:
    """Class and message of an error in at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
