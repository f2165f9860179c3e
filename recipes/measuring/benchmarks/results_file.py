"""A JSON file with a list of rows, to which several processes add theirs as they get them."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

from deltanet_hf.safe_write import write_atomically


def add_row(path: Path, row: dict[str, Any], key: tuple[str, ...]) -> None:
    """Add a row to the file at `path`, in place of the one with the same values of the keys `key`, if there is one.

    A crash leaves the file with or without the row, and processes that add rows at the same time wait for each other.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = json.loads(path.read_text()) if path.is_file() else []
        same = [old for old in rows if all(old.get(name) == row.get(name) for name in key)]
        rows = [old for old in rows if old not in same] + [row]
        write_atomically(path, (json.dumps(rows, indent=1) + "\n").encode())
