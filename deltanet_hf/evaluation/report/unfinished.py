"""The measurements of an unfinished report: after an interruption, the same command measures the other models only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.measures.measure import Measured
from deltanet_hf.evaluation.measures.scores import Score
from deltanet_hf.evaluation.measures.speed import SpeedPoint
from deltanet_hf.evaluation.report.bench import Outcome
from deltanet_hf.evaluation.report.material import ReportOptions
from deltanet_hf.evaluation.report.model_rows import ModelRow
from deltanet_hf.evaluation.report.model_scores import ModelScores
from deltanet_hf.evaluation.tasks.harness import TaskResult
from deltanet_hf.evaluation.tasks.suites import SUITES
from deltanet_hf.hub import model_folder
from deltanet_hf.journal import Journal, file_states

JOURNAL = ".unfinished.jsonl"
MEASURED = ("texts", "recall", "control")  # attributes of `ModelScores`
WITHOUT_EFFECT = ("out", "processes")  # options that do not change the scores


class Unfinished(Journal):
    """The file `.unfinished.jsonl` of a report's folder, whose steps are the outcomes of the rows.

    Args:
        rows: the rows of the report, in order.
        say: receives a line about what an earlier run left.
    """

    def __init__(self, options: ReportOptions, rows: list[ModelRow], say: Callable[[str], None]) -> None:
        super().__init__(options.out / JOURNAL, "an unfinished report", "all models are measured")
        self.outcomes: list[Outcome] = []
        names, request = [row.name for row in rows], _request(options, rows)

        def read() -> None:
            done = list(self.steps)
            if done != names[: len(done)]:
                raise ValueError("other models")
            self.outcomes = [_outcome(figures, options.suite) for figures in self.steps.values()]

        try:
            found = self.resume(request, read)
        except UserError as error:
            say(str(error))
            found = False
        if not found:
            self.begin(request)
        if self.steps:
            say(f"continues after {list(self.steps)[-1]} ({len(self.steps)} of {len(names)} models measured before)")

    def add(self, row: ModelRow, outcome: Outcome) -> None:
        """Record the outcome of the next row; it is on the disk when this returns."""
        self.done(row.name, _figures(outcome))


def _request(options: ReportOptions, rows: list[ModelRow]) -> dict[str, Any]:
    """Everything that the scores depend on: options, software, and the state of each file that is read."""
    given = {field.name: getattr(options, field.name) for field in fields(options)}
    paths = [model_folder(row.folder) for row in rows] + [
        Path(path) for path in (options.data, options.haystack, *options.texts.values()) if path
    ]
    return {
        "options": {name: value for name, value in given.items() if name not in WITHOUT_EFFECT},
        "files": {str(path): file_states(path) for path in paths},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _figures(outcome: Outcome) -> dict[str, Any]:
    scores = outcome.scores
    return {
        "tasks": {
            name: {"samples": result.samples.tolist(), "scores": {key: asdict(s) for key, s in result.scores.items()}}
            for name, result in scores.tasks.items()
        },
        **{name: getattr(scores, name).to_dict() for name in MEASURED},
        "speed": [asdict(point) for point in scores.speed],
        "seconds": scores.seconds,
        "settings": outcome.settings,
    }


def _outcome(figures: dict[str, Any], suite: str) -> Outcome:
    """The inverse of `_figures`."""
    scores = ModelScores(
        tasks={
            name: TaskResult(
                np.asarray(result["samples"], dtype=np.float64),
                {key: Score(**values) for key, values in result["scores"].items()},
            )
            for name, result in figures["tasks"].items()
        },
        **{name: Measured.from_dict(figures[name]) for name in MEASURED},
        speed=[SpeedPoint(**point) for point in figures["speed"]],
        seconds=figures["seconds"],
    )
    settings = figures["settings"]
    return Outcome(scores, [task for task in SUITES[suite].tasks if task.name in settings["tasks"]], settings)
