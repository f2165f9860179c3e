"""The journal of an unfinished output folder: a JSON-lines file of the request and of every finished step."""

import json
import os
from pathlib import Path
from typing import Any

from .safe_write import sync_folder, writing

Steps = dict[str, dict[str, Any]]  # name of a finished step -> the figures recorded with it


def append(journal: Path, line: dict[str, Any]) -> None:
    """Adds one line; when this returns, the line is on the disk."""
    with writing(journal):
        with journal.open("ab") as stream:
            stream.write((json.dumps(line) + "\n").encode())
            stream.flush()
            os.fsync(stream.fileno())
        sync_folder(journal.parent)


def read(journal: Path) -> tuple[dict[str, Any] | None, Steps]:
    """Returns the request (None if the journal is empty) and the finished steps.

    A last line that a crash left incomplete is cut off the file.
    """
    data = journal.read_bytes()
    complete = data[: data.rfind(b"\n") + 1]
    if len(complete) != len(data):
        with writing(journal):
            os.truncate(journal, len(complete))
    lines = [json.loads(line) for line in complete.splitlines()]
    if not lines:
        return None, {}
    return lines[0]["request"], {line["step"]: line["figures"] for line in lines[1:]}


def first_difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Names the first key in which two requests differ, with both values; nested keys are separated by dots."""
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if old != new:
            if isinstance(old, dict) and isinstance(new, dict):
                return f"{key}.{first_difference(old, new)}"
            return f"{key} ({old!r}, now {new!r})"
    return "request"
