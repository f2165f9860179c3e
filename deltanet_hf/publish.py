"""The hidden folder beside OUT where a conversion happens, and the moment in which it becomes OUT.

.NAME.incomplete/journal.jsonl   what is asked for (first line), then one line for each finished step
.NAME.incomplete/model/          the output, published by one rename
.NAME.incomplete/replaced/       with --overwrite: the old OUT, from the swap until the new one is in place
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from .errors import UserError
from .safe_write import sync_folder, writing

JOURNAL = "journal.jsonl"
LOCK = "lock"
READY = "ready"  # the step after which `model` only waits for its rename


class Workspace:
    """One conversion's folder, its lock and its journal of finished steps."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out.parent / f".{out.name}.incomplete"
        self.model = self.folder / "model"
        self.replaced = self.folder / "replaced"
        self.journal = self.folder / JOURNAL
        self.steps: dict[str, dict[str, Any]] = {}

    @contextmanager
    def opened(self, request: dict[str, Any], *, resume: bool, overwrite: bool) -> Iterator["Workspace"]:
        """The folder, locked, either fresh or with the finished steps of the run that was interrupted.

        Args:
            request: JSON value of everything that the result depends on; a resumed run must ask for the same.

        Raises:
            UserError: OUT exists and may not be replaced, another run is at work here, an unfinished run
            lies here and
                `resume` was not given, or it asked for something else.
        """
        lock = self._lock()
        try:
            if self.journal.exists():
                self._take_up(request, resume, overwrite)
            if not self.journal.exists():
                self._clear()
                self._check_target(overwrite)
                with writing(self.model):
                    self.model.mkdir()
                self._append({"request": request})
            yield self
        finally:
            lock.close()

    def _lock(self) -> IO[str]:
        with writing(self.folder):
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(exist_ok=True)
            lock = (self.folder / LOCK).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise UserError(f"{self.folder}: another conversion to {self.out} is running; wait for it") from error
        return lock

    def _take_up(self, request: dict[str, Any], resume: bool, overwrite: bool) -> None:
        asked, steps = _read_journal(self.journal)
        published = READY in steps and not self.model.exists()  # killed after the last rename, while tidying up
        if published and resume:
            self.steps = steps
            return
        if asked is None or published:
            self._clear()
            return
        if not resume:
            if not overwrite:
                raise UserError(
                    f"{self.folder}: an interrupted conversion to {self.out} lies here; run with --resume "
                    "to complete it or with --overwrite to begin again"
                )
            self._clear()
            return
        if asked != request:
            raise UserError(
                f"{self.folder}: the interrupted conversion had another {_difference(asked, request)}; "
                "repeat the first command with --resume, or begin again with --overwrite"
            )
        self._check_target(overwrite)
        self.steps = steps

    def _check_target(self, overwrite: bool) -> None:
        problem = None
        if self.out.is_symlink() or (self.out.exists() and not self.out.is_dir()):
            problem = "exists and is not a folder; choose another name"
        elif self.out.exists() and not _is_empty_folder(self.out):
            if not overwrite:
                problem = "exists; choose another folder, or add --overwrite to replace it"
            elif not (self.out / "config.json").exists():
                problem = "exists and holds no model to overwrite (no config.json); choose another folder"
        if problem:
            if not self.journal.exists():
                self.discard()
            raise UserError(f"{self.out}: {problem}")

    def done(self, step: str, figures: dict[str, Any] | None = None) -> None:
        """Records a finished step; what it wrote must be on the disk already."""
        self._append({"step": step, "figures": figures or {}})
        self.steps[step] = figures or {}

    def _append(self, line: dict[str, Any]) -> None:
        with writing(self.journal):
            with self.journal.open("ab") as stream:
                stream.write((json.dumps(line) + "\n").encode())
                stream.flush()
                os.fsync(stream.fileno())
            sync_folder(self.folder)

    def publish(self) -> None:
        """Makes `model` the output. An old OUT stays until the new one can take its place."""
        if READY not in self.steps:
            raise ValueError("the output is not ready")
        with writing(self.out):
            if self.model.exists():
                if self.out.exists() and not _is_empty_folder(self.out):
                    os.replace(self.out, self.replaced)
                os.replace(self.model, self.out)
                sync_folder(self.out.parent)
        self.discard()

    def discard(self) -> None:
        """Removes the folder and everything in it; an old OUT that was set aside goes back first."""
        self._clear()
        with writing(self.folder):
            shutil.rmtree(self.folder)

    def _clear(self) -> None:
        with writing(self.folder):
            if self.replaced.exists() and not self.out.exists():
                os.replace(self.replaced, self.out)
            for entry in sorted(self.folder.iterdir()):
                if entry.name in (JOURNAL, LOCK):  # the journal goes last: it says what the rest is
                    continue
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
            self.journal.unlink(missing_ok=True)
        self.steps = {}


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _read_journal(path: Path) -> tuple[dict[str, Any] | None, dict[str, dict[str, Any]]]:
    """The request and the finished steps. A last line torn by a crash is cut off."""
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        with writing(path):
            os.truncate(path, len(whole))
    lines = [json.loads(line) for line in whole.splitlines()]
    if not lines:
        return None, {}
    return lines[0]["request"], {line["step"]: line["figures"] for line in lines[1:]}


def _difference(asked: dict[str, Any], request: dict[str, Any]) -> str:
    for key in sorted(asked.keys() | request.keys()):
        if asked.get(key) != request.get(key):
            old, new = asked.get(key), request.get(key)
            if isinstance(old, dict) and isinstance(new, dict):
                return f"{key}: {_difference(old, new)}"
            return f"{key} ({old!r}, now {new!r})"
    return "request"
