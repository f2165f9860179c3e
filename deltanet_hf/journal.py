"""The journal of a job: from it, the job continues after an interruption at any moment."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import UserError, one_line
from .safe_write import remove, sync_folder, write_atomically, writing


class Journal:
    """JSON lines: first the request, which is everything that the results depend on, then one line per finished step.

    Args:
        path: the file, which may be missing.
        what: the job in errors, such as "an unfinished report".
        remedy: what they tell the user to do.

    Attributes:
        steps: name of a finished step -> the figures recorded with it.
    """

    def __init__(self, path: Path, what: str, remedy: str) -> None:
        self.path, self._what, self._remedy = path, what, remedy
        self.steps: dict[str, Any] = {}

    def resume(self, request: dict[str, Any], check: Callable[[], object] = lambda: None) -> bool:
        """Loads the steps of the job, and returns whether it has begun. A last line that a crash cut is removed.

        Args:
            check: raises ValueError, KeyError, TypeError or AttributeError unless `steps` are what the job records.

        Raises:
            UserError: the file belongs to another request, or is damaged. It stays as it is.
        """
        with writing(self.path):
            if not self.path.exists():
                return False
            data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if not whole and _line({"request": request}).startswith(data):
            return False
        try:
            first, *lines = map(json.loads, whole.splitlines())
            if not isinstance(first["request"], dict):
                raise TypeError("no request")
            difference = first_difference(first["request"], json.loads(_line(request)))
            if difference is None:
                self.steps = {line["step"]: line["figures"] for line in lines}
                check()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self.steps = {}
            raise UserError(
                f"{self.path}: damaged, or a file of something else ({one_line(error, 100)}); {self._remedy}"
            ) from error
        if difference is not None:
            raise UserError(f"{self.path}: holds {self._what} with another {difference}; {self._remedy}")
        if len(whole) < len(data):
            with writing(self.path):
                os.truncate(self.path, len(whole))
        return True

    def begin(self, request: dict[str, Any]) -> None:
        """Starts the file anew, without a step."""
        self.steps = {}
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, _line({"request": request}))

    def done(self, step: str, figures: Any) -> None:
        """Records a finished step, which is on the disk when this returns. So must be what the step wrote."""
        with writing(self.path):
            with self.path.open("ab") as stream:
                stream.write(_line({"step": step, "figures": figures}))
                stream.flush()
                os.fsync(stream.fileno())
            sync_folder(self.path.parent)
        self.steps[step] = figures

    def remove(self) -> None:
        """Deletes the file, after the job."""
        with writing(self.path):
            remove(self.path)


def file_states(path: Path) -> dict[str, list[int]]:
    """For requests: the state of a file, or of all files in a folder; nothing for a Hub id."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file_state(file) for file in files}


def file_state(file: Path) -> list[int]:
    """Size in bytes and time of change in ns."""
    state = file.stat()
    return [state.st_size, state.st_mtime_ns]


def first_difference(before: Any, now: Any, name: str = "") -> str | None:
    """The first key in which two requests differ, nested ones with dots, and both values; None if they are equal.

    A key that is missing counts as None.
    """
    old, new = _items(before), _items(now)
    if old is not None and new is not None:
        keys = sorted(old.keys() | new.keys(), key=str)
        found = (first_difference(old.get(key), new.get(key), f"{name}.{key}".strip(".")) for key in keys)
        return next(filter(None, found), None)
    return None if before == now else f"{name} ({before!r}, now {now!r})"


def _items(value: Any) -> dict[Any, Any] | None:
    """The values inside of an object or of a list of objects."""
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return dict(enumerate(value))
    return value if isinstance(value, dict) else None


def _line(value: Any) -> bytes:
    """A line of JSON, in which tuples are lists, and paths strings."""
    return (json.dumps(value, default=str) + "\n").encode()
