"""Shows the progress of a selection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .run import Show


@contextmanager
def shown_on(console: Console) -> Iterator[Show]:
    """Shows a line per round, and on a terminal a bar below them."""
    if not console.is_terminal:
        yield lambda done, total, line: console.print(line, highlight=False, markup=False) if line else None
        return
    columns = (TextColumn("selecting"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(done: float, total: int, line: str | None) -> None:
            bar.update(task, completed=done, total=total)
            if line:
                console.print(line, highlight=False, markup=False)

        yield show
