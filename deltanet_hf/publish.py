"""Writes an output folder that is never seen half finished.

The work happens in a hidden folder beside OUT:

.NAME.incomplete/journal.jsonl   the request (first line), then one line per finished step
.NAME.incomplete/model/          the new folder, which one rename turns into OUT
.NAME.incomplete/replaced/       with `overwrite`: the old OUT, until the new one is in its place
.NAME.incomplete/lock            held by the process that is writing

A process killed at any moment leaves OUT absent, old or complete. The next call with `resume` continues after the last
finished step and produces the same bytes. `publish_folder` is the entry; this module imports neither torch nor
transformers.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import QualityError, UserError
from .file_lock import locked
from .journal import Journal
from .safe_write import sync_folder, writing

JOURNAL = "journal.jsonl"
LOCK = "lock"
LONGEST_NAME = 255  # bytes of a file name
READY = "ready"  # the last step: after it, `model` only has to be renamed


def publish_folder(
    out: Path,
    request: dict[str, Any],
    fill: Callable[["Workspace"], dict[str, Any]],
    *,
    resume: bool,
    overwrite: bool,
    finished: Callable[[], dict[str, Any] | None] = lambda: None,
    what: str = "conversion",
) -> dict[str, Any]:
    """Creates the folder `out`, or replaces it, in one rename.

    Args:
        request: JSON value of everything that the result depends on. A resumed run must have the same request.
        fill: writes all files into `workspace.model` and returns figures to record. It may call `workspace.done(step)`
            after each unit of work and skip the steps that are in `workspace.steps`.
        resume: continue an interrupted run; if there is none, start from the beginning.
        overwrite: replace an existing `out` that holds a model (a `config.json`), and discard an interrupted run
            unless `resume` is given too.
        finished: called with `resume` when no run was interrupted: the figures, if `out` already holds this result.
        what: noun for the work in error messages.

    Returns:
        The figures of `fill`, or those of the run that had finished it.

    Raises:
        UserError: `out` exists and may not be replaced; another process is writing it; an interrupted run exists and
            `resume` was not given, or its request was different; the disk refuses to write.
    """
    check_target(out)
    workspace = Workspace(out, what)
    if resume and not workspace.journal.path.exists() and (figures := finished()) is not None:
        if workspace.folder.exists():  # the earlier run was killed during the last step of its cleanup
            with locked(workspace.folder / LOCK, out, what):
                workspace.discard()
        return figures
    with workspace.opened(request, resume=resume, overwrite=overwrite):
        if READY not in workspace.steps:
            try:
                figures = fill(workspace)
            except (UserError, QualityError):
                if not workspace.steps:  # nothing worth resuming
                    workspace.discard()
                raise
            with writing(workspace.model):
                sync_folder(workspace.model)
            workspace.done(READY, figures)
        figures = dict(workspace.steps[READY])
        workspace.publish()
    return figures


def output_path(path: Path) -> Path:
    """`path` from the root on, with the home that `~` stands for; UserError if it ends in no name."""
    try:
        out = Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise UserError(f"{path}: cannot be made ({error}); choose another output") from error
    if out.name in ("", ".."):
        raise UserError(f"{path}: names no new folder or file; choose another output")
    return out


def check_target(out: Path) -> None:
    """Raises UserError if the folder `out` cannot be made: its name, a file in its path, permissions."""
    hidden = Workspace(out).folder
    remedy = "choose another output folder"
    if any(len(os.fsencode(part)) > LONGEST_NAME for part in hidden.parts):
        raise UserError(f"{out}: a name in it is too long; {remedy}")
    try:
        str(hidden).encode()
        os.lstat(hidden)
    except FileNotFoundError:
        existing = next(parent for parent in hidden.parents if parent.exists())
        if not os.access(existing, os.W_OK | os.X_OK):
            raise UserError(f"{out}: cannot be written: {existing} is not yours to write to; {remedy}") from None
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a zero byte
        raise UserError(f"{out}: cannot be made ({getattr(error, 'strerror', error)}); {remedy}") from error


class Workspace:
    """The hidden folder of one output folder: its lock, its journal and the rename that publishes it."""

    def __init__(self, out: Path, what: str = "conversion") -> None:
        self.out, self.what = out, what
        self.folder = out.parent / f".{out.name}.incomplete"
        self.model = self.folder / "model"
        self.replaced = self.folder / "replaced"
        self.journal = Journal(
            self.folder / JOURNAL,
            f"an interrupted {what} to {out}",
            "start again with --overwrite, or repeat the first command with --resume",
        )

    @property
    def steps(self) -> dict[str, Any]:
        """The finished steps with their figures."""
        return self.journal.steps

    @contextmanager
    def opened(self, request: dict[str, Any], *, resume: bool, overwrite: bool) -> Iterator["Workspace"]:
        """Locks the folder and prepares it: empty, or with the finished steps of an interrupted run.

        Arguments and errors are those of `publish_folder`.
        """
        with locked(self.folder / LOCK, self.out, self.what):
            half_done = self.journal.path.exists() and self.model.exists()
            if resume and self.journal.resume(request) and (half_done or READY in self.steps):
                if half_done:  # else it was killed after the last rename, during cleanup
                    self._check_out(overwrite)
                yield self
                return
            if half_done and not (resume or overwrite):
                raise UserError(
                    f"{self.folder}: holds an interrupted {self.what} to {self.out}; run with --resume to complete it "
                    "or with --overwrite to start again"
                )
            self._clear()
            self._check_out(overwrite)
            with writing(self.model):
                self.model.mkdir()
            self.journal.begin(request)
            yield self

    def _check_out(self, overwrite: bool) -> None:
        problem = None
        if self.out.is_symlink() or (self.out.exists() and not self.out.is_dir()):
            problem = "exists and is not a folder; choose another name"
        elif self.out.exists() and not _is_empty_folder(self.out):
            if not overwrite:
                problem = "exists; choose another folder, or add --overwrite to replace it"
            elif not (self.out / "config.json").exists():
                problem = "exists and holds no model to overwrite (no config.json); choose another folder"
        if problem:
            if not self.journal.path.exists():
                self.discard()
            raise UserError(f"{self.out}: {problem}")

    def done(self, step: str, figures: dict[str, Any] | None = None) -> None:
        """Records a finished step. Everything that the step wrote must already be on the disk."""
        self.journal.done(step, figures or {})

    def publish(self) -> None:
        """Renames `model` to OUT. An old OUT is kept until the new one can take its place."""
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
        """Removes the hidden folder with everything in it; an old OUT that was set aside is put back first."""
        self._clear()
        with writing(self.folder):
            try:
                shutil.rmtree(self.folder)
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:  # another process has begun to write OUT
                    raise

    def _clear(self) -> None:
        with writing(self.folder):
            if self.replaced.exists() and not self.out.exists():
                os.replace(self.replaced, self.out)
            for entry in sorted(self.folder.iterdir()):
                if entry.name in (JOURNAL, LOCK):  # the journal goes last, because it describes the rest
                    continue
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
            self.journal.remove()


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
