"""Shows the progress of a conversion."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..convert import Progress as Show


@contextmanager
def shown_on(console: Console, layers: int, device: str) -> Iterator[Show]:
    """Shows the steps of a conversion: a bar on a terminal, else a line per step.

    Args:
        layers: number of decoder layers.
        device: the device's name, which is shown with each layer.

    Yields:
        The function that `convert` calls after each step.
    """
    if not console.is_terminal:
        started = time.monotonic()

        def line(done: int, total: int, step: str, figures: dict[str, Any]) -> None:
            elapsed = timedelta(seconds=int(time.monotonic() - started))
            said = f"{done}/{total} {elapsed} {_said(step, figures, device)}"
            console.print(said, highlight=False, markup=False, soft_wrap=True)

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(f"converting on {device}", total=layers)
        yield lambda done, total, step, figures: bar.update(
            task, completed=done, total=total, description=_said(step, figures, device)
        )


def _said(step: str, figures: dict[str, Any], device: str) -> str:
    error = f", relative MSE {figures['relative_mse']:.3f}" if "relative_mse" in figures else ""
    return f"{step} on {device}{error}" if step.startswith("layer") else step
