"""The options of `python -m measuring.lab`, and the loop over its models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from deltanet_hf.errors import UserError
from measuring.lab.experiment import Experiment, model_of, row_of
from measuring.lab.plot import plot, read_rows
from measuring.lab.presets import PRESETS
from measuring.lab.table import table
from measuring.lab.tiny_models import MixerChoice
from measuring.lab.training import Show
from measuring.rows import RowFile


def main(
    task: Annotated[
        str, typer.Argument(help="parity, s3, s5 (running products of permutations) or mqar (recall of pairs).")
    ],
    mixer: Annotated[
        list[str],
        typer.Option(
            help="NAME or NAME:KEY=VALUE,KEY=VALUE: a mixer of `deltanet-hf convert` with settings as its --set "
            "takes them, or softmax; repeatable."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="JSON file to which rows are added. Default: lab/TASK.json.")] = None,
    seed: Annotated[list[int] | None, typer.Option(min=0, help="Repeatable. Default: 0.")] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option(min=2, help="Size of a head, which sets that of its state; repeatable.")
    ] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Width of the residual stream.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Number of layers.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps.")] = None,
    rate: Annotated[float | None, typer.Option(min=0, help="Largest learning rate.")] = None,
    batch_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens per step.")] = None,
    decay: Annotated[float | None, typer.Option(min=0, help="Weight decay.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Number of heads.")] = None,
) -> None:
    """Train and test every mixer with every head size and seed; write rows and a plot, print a table."""
    if task not in PRESETS:
        raise UserError(f"TASK: got {task!r}, expected one of {', '.join(PRESETS)}")
    preset, out = PRESETS[task], out or Path("lab") / f"{task}.json"
    changes: dict[str, Any] = {"steps": steps, "rate": rate, "batch_tokens": batch_tokens, "decay": decay}
    training = replace(preset.training, **{key: value for key, value in changes.items() if value is not None})
    experiments = [
        Experiment(
            MixerChoice(label),
            size,
            number,
            width or preset.width,
            layers or preset.layers,
            heads or preset.heads,
            training,
        )
        for size in head_dim or preset.head_dims
        for label in dict.fromkeys(mixer)
        for number in dict.fromkeys(seed or (0,))
    ]
    made = preset.task()
    for experiment in experiments:
        model_of(experiment, preset, made)  # a wrong setting ends the command before anything is trained
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = Console()
    file = RowFile(out)
    for place, experiment in enumerate(experiments):
        if file.find({"run": experiment.name(made)}) is not None:
            continue  # by an earlier call
        label = f"{place + 1}/{len(experiments)} {experiment.name(made)}"
        with shown_on(console, label, training.steps) as show:
            row = row_of(experiment, preset, made, device, show)
        file.add(row)
        console.print(f"{label}: {_line(row)}", highlight=False, markup=False, soft_wrap=True)
    names = {experiment.name(made) for experiment in experiments}
    rows = [row for row in read_rows([out]) if row["task"] == task]
    print(table([row for row in rows if row["run"] in names]))
    if any("error" not in row for row in rows):
        plot(rows, preset.title, out.with_suffix(".png"))
        typer.echo(f"{out}, {out.with_suffix('.png')}")


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return str(row["error"])
    cells = (f"{point}: {100 * value:.1f}%" for point, value in zip(row["points"], row["accuracy"], strict=True))
    return f"{'  '.join(cells)} ({row['seconds']:.0f} s)"


@contextmanager
def shown_on(console: Console, label: str, steps: int) -> Iterator[Show]:
    """Shows the progress of one model: a bar on a terminal, else nothing."""
    if not console.is_terminal:
        yield lambda step, level, accuracy: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=steps, said="")
        yield lambda step, level, accuracy: bar.update(
            task, completed=step, said=f"level {level + 1}, {100 * accuracy:.0f}% right"
        )
