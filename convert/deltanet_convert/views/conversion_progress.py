"""Shows the progress of a conversion."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from ..conversion import Progress as Show


@contextmanager
def shown_on(console: Console, fitted: Sequence[bool], device: str) -> Iterator[Show]:
    """Shows the steps of a conversion with the time that is left: a bar on a terminal, else a line per step.

    Args:
        fitted: for each decoder layer, whether it is fitted; the others take next to no time.
        device: the device's name, which is shown with each layer.

    Yields:
        The function that `convert` calls after each step.
    """
    started, ahead = time.monotonic(), list(fitted)

    def left(done: int, step: str) -> str:
        """The time for the layers to come, if it is known: as much per fitted layer as for those of this run."""
        if not step.startswith("layer"):
            ahead[:done] = [False] * done  # of the run that is resumed
            return ""
        before, after = sum(ahead[:done]), sum(ahead[done:])
        if not before or not after:
            return ""
        seconds = (time.monotonic() - started) / before * after
        return f", about {timedelta(seconds=math.ceil(seconds))} left"

    if not console.is_terminal:

        def line(done: int, total: int, step: str, figures: dict[str, Any]) -> None:
            elapsed = timedelta(seconds=int(time.monotonic() - started))
            said = f"{done}/{total} {elapsed} {_said(step, figures, device)}{left(done, step)}"
            console.print(said, highlight=False, markup=False, soft_wrap=True)

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(f"converting on {device}", total=len(fitted))
        yield lambda done, total, step, figures: bar.update(
            task, completed=done, total=total, description=_said(step, figures, device) + left(done, step)
        )


def _said(step: str, figures: dict[str, Any], device: str) -> str:
    error = f", relative MSE {figures['relative_mse']:.3f}" if "relative_mse" in figures else ""
    return f"{step} on {device}{error}" if step.startswith("layer") else step
