"""Runs a selection: reference losses, one round per kept unit, allocations of a budget in bytes, the file, the plot."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from deltanet_hf.errors import UserError
from deltanet_hf.file_lock import locked_beside
from deltanet_hf.models.far_positions import place_positions
from deltanet_hf.safe_write import write_atomically

from ..storage.versions import versions
from .allocation import Allocation, allocations, best_of, sharing_copy
from .journal import REFERENCES, SelectionJournal
from .methods import Forward, Gradient, NextUnit, Round
from .objectives import AnswerLoss, TextKL
from .plot import selection_plot
from .references import References
from .scoring import Scorer
from .selection_file import Selection
from .switchable import SwitchableModel
from .task import TEXT_ROWS, SelectionTask
from .units import Unit, evenly, to_json

DIGITS = 6  # of the scores in the file
Show = Callable[[float, int, str | None], None]
"""Called with the rounds that are done (with a fraction), their total, and a line about what is done or None."""


def unseen(done: float, total: int, line: str | None) -> None:
    """Shows nothing."""


def run_selection(
    task: SelectionTask, out: Path, show: Show = unseen, *, overwrite: bool = False, plot: bool = True
) -> Selection:
    """Runs a selection to the end and writes its file and plot.

    An interrupted run continues after its last round.

    Args:
        out: the file to write.
        show: called with the notes of the task, and with the progress.
        overwrite: replace `out`, and discard an unfinished run with other options.
        plot: whether to draw the scores beside the file.

    Raises:
        UserError: the file exists or cannot be written, another process is writing it, recall probes say nothing about
            this teacher, or the GPU's memory is too small.
    """
    drawn = out.with_suffix(".png") if plot and task.spread is None else None
    for note in task.notes:
        show(0, task.count, note)
    with locked_beside(out, "selection"):
        journal = SelectionJournal(out, _request(task), overwrite, task.candidates.units, drawn)
        try:
            order, scores, windows = _measured(task, journal, show) if task.spread is None else (task.spread, {}, None)
        except (UserError, torch.OutOfMemoryError) as error:
            if not journal.steps:  # nothing worth continuing
                journal.remove()
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{task.teacher.folder}: the GPU's memory is too small to measure the teacher; use a larger one, on "
                "which the same command goes on after the last round, or --device cpu"
            ) from error
        selection = task.selection(order, scores, windows)
        write_atomically(out, (json.dumps(selection.to_json(), indent=1) + "\n").encode())
        if drawn is not None:
            write_atomically(drawn, selection_plot(selection))
        journal.remove()
    return selection


def _measured(
    task: SelectionTask, journal: SelectionJournal, show: Show
) -> tuple[Sequence[Unit], dict[str, Any], tuple[int, ...] | None]:
    """The kept units, the most important one first, what was measured, and the planned windows."""
    options = task.options
    if options.window + options.sinks >= task.length:
        raise UserError(
            f"--window {options.window}: with {options.sinks} sinks it shows all {task.length} tokens of a probe; "
            "choose a smaller window, or a larger --length within the teacher's context"
        )
    objective = _objective(task)
    task.teacher.check_tokens(objective.ids)
    rounds = journal.rounds()
    show(len(rounds), task.count, f"continued after round {len(rounds)}" if rounds else None)
    loaded = task.teacher.load_weights(options.torch_device, options.torch_dtype)
    if task.positions is not None:
        place_positions(loaded, task.positions)
    model = SwitchableModel(sharing_copy(loaded), task.candidates, options.window, options.sinks)
    scorer = Scorer(model, lambda share: show(len(rounds) + share, task.count, None))
    recorded = references = journal.references()
    if references is None or isinstance(objective, TextKL):
        measured = References.measure(scorer, objective)  # which also keeps the teacher's logits for the KL
        references = references or measured
    for name, reason in references.dropped.items():
        show(len(rounds), task.count, f"probes of the format '{name}' are left out: {reason}")
    score = references.score(scorer, objective, task.teacher.name)
    if recorded is None:  # not before they are known to be usable: a run with other options would be refused
        journal.done(REFERENCES, references.to_json())
    units = task.candidates.units
    next_unit: NextUnit = (Gradient if options.method == "gradient" else Forward)(score, units)

    def most_important(count: int) -> list[Unit]:
        """The first `count` units, after as many rounds."""
        while len(rounds) < count:
            step = next_unit([step.unit for step in rounds])
            journal.round_done(len(rounds) + 1, step)
            rounds.append(step)
            show(len(rounds), task.count, f"{len(rounds)}/{task.count}: {_named(step.unit)}, score {step.score:.3f}")
        return [step.unit for step in rounds[:count]]

    if task.spending is None:
        count, windows, more = task.count, None, {}
    else:

        def record(found: Allocation) -> None:
            journal.allocated(found)
            show(len(rounds), task.count, str(found))

        tried = allocations(task, loaded, scorer, most_important, journal.allocations(), record)
        best = best_of(tried)
        count, windows, more = best.kept, best.windows, {"allocations": [found.to_json() for found in tried]}
    chosen = most_important(count)
    uniform = score.of(evenly(units, count))
    return chosen, _scores(references, rounds[:count], uniform) | more, windows


def _request(task: SelectionTask) -> dict[str, Any]:
    """Everything that the result depends on, as a JSON value."""
    options = task.options
    return {
        "teacher": task.teacher.identity(),
        "unit": options.unit,
        "method": options.choice,
        "budget": task.budget.text,
        "kept": task.count,
        "seed": options.seed,
        "settings": task.settings,
        "device": options.torch_device.type if options.measured else None,
        "versions": versions(),
    }


def _scores(references: References, rounds: list[Round], uniform: float) -> dict[str, Any]:
    """The part "scores" of the file."""
    return {
        "losses": {
            name: {"teacher": round(value, DIGITS), "windows": round(references.windows[name], DIGITS)}
            for name, value in references.teacher.items()
        },
        "dropped": references.dropped,
        "rounds": [
            {
                "unit": to_json(step.unit),
                "score": round(step.score, DIGITS),
                "gains": [[to_json(unit), round(gain, DIGITS)] for unit, gain in sorted(step.gains.items())],
            }
            for step in rounds
        ],
        "uniform": round(uniform, DIGITS),
    }


def _objective(task: SelectionTask) -> AnswerLoss | TextKL:
    options, tokenizer = task.options, task.teacher.tokenizer
    if options.method == "kl":
        rows = TEXT_ROWS * options.probes
        restricted = max(1, task.length - options.window - options.sinks)  # the positions that do not see all
        return TextKL.of_texts(tokenizer, task.length, rows, restricted, options.seed)
    return AnswerLoss.of_texts(tokenizer, task.length, options.probes, options.window, options.seed)


def _named(unit: Unit) -> str:
    return f"layer {unit[0]}" if len(unit) == 1 else f"layer {unit[0]}, key/value head {unit[1]}"
