"""The output of a run while it trains: a JSONL log and CSV tables, a progress bar or lines, and optional trackers."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from deltanet_hf.safe_write import write_atomically, writing
from deltanet_recipes.schema import Recipe

LOG = "log.jsonl"
SILENCE = 30.0  # seconds without a line after which a finished step gets one
IN_EVERY_ROW = {"stage", "step"}
LAYER_ERROR = "held_out.error."
SHOWN = ("loss", "kl", "ce", "hidden", "error", "held_out.kl", "held_out.perplexity", "held_out.error")


def plain_console() -> Console:
    """Standard error. Names of folders may hold what elsewhere is markup: [bold]."""
    return Console(stderr=True, markup=False, emoji=False)


class Logbook:
    """The log of a run. A row is a dict with `stage`, `step` and numbers. Only an `active` logbook writes anything.

    The logbook of the main process is active; those of the other processes are not.
    """

    def __init__(self, folder: Path, recipe: Recipe, active: bool, console: Console | None = None) -> None:
        self.folder, self.active = folder, active
        self.console = console or plain_console()
        self._progress: Progress | None = None
        self._printed = time.monotonic()
        self._trackers: Any = None
        if active and recipe.log.trackers:
            from accelerate import Accelerator

            self._trackers = Accelerator(log_with=list(recipe.log.trackers), project_dir=str(folder))
            self._trackers.init_trackers("deltanet-hf", config=_flat(recipe.model_dump(mode="json")))

    def say(self, message: str) -> None:
        """Print a message."""
        if self.active:
            self._print(message)

    def begin(self, label: str, steps: int, done: int) -> None:
        """Show a progress bar for a stage. Where the output is no terminal, rows are printed as lines instead."""
        if self.active and self.console.is_terminal:
            rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
            figures = TextColumn("{task.fields[figures]}", table_column=rest)
            bar = (
                TextColumn("{task.description}", markup=False),
                BarColumn(12),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                figures,
            )
            self._progress = Progress(*bar, console=self.console, expand=True)
            self._progress.start()
            self._progress.add_task(label, total=steps, completed=done, figures="")

    def tick(self, stage: str, step: int, steps: int) -> None:
        """Show that a step is done: the bar moves; without one, a line if there was none for half a minute."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step)
        elif self.active and time.monotonic() - self._printed > SILENCE:
            self._print(f"{stage} {step}/{steps}")

    def end(self) -> None:
        """Remove the progress bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def write(self, row: dict[str, Any], steps: int) -> None:
        """Append a row to the log and show it; `steps` is the number of steps of the stage."""
        if not self.active:
            return
        path = self.folder / LOG
        with writing(path), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        numbers = {k: v for k, v in row.items() if isinstance(v, (int, float))}
        if self._trackers is not None:
            named = {f"{row['stage']}/{key}": value for key, value in numbers.items()}
            self._trackers.log(named, step=row["total_steps"])
        parts = [f"{key} {row[key]:.4g}" for key in SHOWN if key in row]
        trained = row["tokens_per_second"] > 0  # not before the first step of a stage
        parts += [f"{row['tokens_per_second']:,.0f} tok/s"] * trained
        parts.append(f"{row['memory_gib']:.1f} GiB")
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=row["step"], figures="  ".join(parts))
        else:
            left = (steps - row["step"]) * row["seconds_per_step"]
            parts += [f"ETA {_clock(left)}"] * trained
            self._print(f"{row['stage']} {row['step']}/{steps}  {'  '.join(parts)}")

    def _print(self, line: str) -> None:
        """Print a line, which a log takes at any length."""
        self._printed = time.monotonic()
        self.console.print(line, highlight=False, soft_wrap=not self.console.is_terminal)

    def truncate(self, stage: str, step: int) -> None:
        """Remove a stage's rows after `step`, which a resumed run writes again."""
        path = self.folder / LOG
        if not self.active or not path.is_file():
            return
        kept = [line for line, row in _rows(path) if not (row["stage"] == stage and row["step"] > step)]
        write_atomically(path, "".join(kept).encode())

    def tables(self) -> None:
        """Write the log as one CSV file per stage, log.STAGE.csv."""
        path = self.folder / LOG
        if not self.active or not path.is_file():
            return
        by_stage: dict[str, list[dict[str, Any]]] = {}
        for _, row in _rows(path):
            by_stage.setdefault(row["stage"], []).append(row)
        for stage, rows in by_stage.items():
            columns = list(dict.fromkeys(key for row in rows for key in row))
            table = self.folder / f"log.{stage}.csv"
            with writing(table), open(table, "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, columns)
                writer.writeheader()
                writer.writerows(rows)

    def close(self) -> None:
        """Write the tables and close the trackers."""
        self.end()
        self.tables()
        if self._trackers is not None:
            self._trackers.end_training()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """All rows of the log in the folder of a run, in order; none if there is no log."""
    path = folder / LOG
    return [row for _, row in _rows(path)] if path.is_file() else []


def layer_errors(rows: list[dict[str, Any]]) -> tuple[dict[int, float], dict[int, float]]:
    """The first and the last held-out alignment error of each layer in the log."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith(LAYER_ERROR):
                index = int(key.removeprefix(LAYER_ERROR))
                first.setdefault(index, value)
                last[index] = value
    return first, last


def _rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The lines of a log with their content. A line that a kill or a full disk cut short, or damaged, is left out."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and row.keys() >= IN_EVERY_ROW:
            found.append((line + "\n", row))
    return found


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """The values of a recipe under dotted names, for trackers. Keys without a value are left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {} if value is None else {name: value}
    return {key: inner for part, child in items for key, inner in _flat(child, f"{name}.{part}".strip(".")).items()}


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S" if seconds >= 3600 else "%M:%S", time.gmtime(max(0.0, seconds)))
