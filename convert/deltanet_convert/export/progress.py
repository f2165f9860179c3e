"""The progress bar of an export or import."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .folder_writer import Progress as Report


@contextmanager
def progress_bar(console: Console, what: str) -> Iterator[Report]:
    """Shows a bar over the steps of writing a folder; yields the function that `write_folder` calls."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
