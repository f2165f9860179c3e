"""The measurements of an unfinished report: after an interruption, the same command measures the other models only."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from deltanet_hf import step_journal
from deltanet_hf.evaluation.measures.relative import Clusters
from deltanet_hf.evaluation.measures.scores import Score
from deltanet_hf.evaluation.measures.speed import SpeedPoint
from deltanet_hf.evaluation.report.bench import Outcome
from deltanet_hf.evaluation.report.contestants import Contestant
from deltanet_hf.evaluation.report.material import ReportOptions
from deltanet_hf.evaluation.report.model_scores import ModelScores
from deltanet_hf.evaluation.tasks.harness import TaskResult
from deltanet_hf.evaluation.tasks.suites import SUITES
from deltanet_hf.safe_write import writing

JOURNAL = ".unfinished.jsonl"
WITHOUT_EFFECT = ("out", "processes")  # options that do not change the scores


class Unfinished:
    """The file `.unfinished.jsonl` of a report's folder: the request, then the outcome of one row per line.

    Args:
        rows: the rows of the report, in order.
        say: receives a line about what an earlier run left.
    """

    def __init__(self, options: ReportOptions, rows: list[Contestant], say: Callable[[str], None]) -> None:
        self.path, self.suite = options.out / JOURNAL, options.suite
        request = json.loads(json.dumps(_request(options, rows), default=str))
        self.outcomes = self._read(request, [row.name for row in rows], say)
        if not self.outcomes:
            self.remove()
            step_journal.append(self.path, {"request": request})

    def _read(self, request: dict[str, Any], names: list[str], say: Callable[[str], None]) -> list[Outcome]:
        if not self.path.exists():
            return []
        try:
            with writing(self.path):
                before, steps = step_journal.read(self.path)
            found = [_outcome(figures, self.suite) for figures in steps.values()]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            say(f"{self.path}: damaged ({type(error).__name__}); all models are measured")
            return []
        if before is None or before != request or list(steps) != names[: len(steps)]:
            difference = step_journal.first_difference(before or {}, request)
            say(f"{self.path}: the unfinished report had another {difference}; all models are measured")
            return []
        if found:
            say(f"continues after {list(steps)[-1]} ({len(found)} of {len(names)} models measured before)")
        return found

    def add(self, row: Contestant, outcome: Outcome) -> None:
        """Record the outcome of the next row; it is on the disk when this returns."""
        step_journal.append(self.path, {"step": row.name, "figures": _figures(outcome)})

    def remove(self) -> None:
        """Delete the file, once the report is complete."""
        with writing(self.path):
            self.path.unlink(missing_ok=True)


def _request(options: ReportOptions, rows: list[Contestant]) -> dict[str, Any]:
    """Everything that the scores depend on: options, software, and the state of each file that is read."""
    given = {field.name: getattr(options, field.name) for field in fields(options)}
    paths = [Path(row.folder) for row in rows] + [
        Path(path) for path in (options.data, options.haystack, options.last_word, *options.texts.values()) if path
    ]
    return {
        "options": {name: value for name, value in given.items() if name not in WITHOUT_EFFECT},
        "files": {str(path): _states(path) for path in paths},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _states(path: Path) -> dict[str, list[int]]:
    """Size in bytes and time of change in ns of a file, or of all files in a folder; nothing for a Hub id."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


def _figures(outcome: Outcome) -> dict[str, Any]:
    scores = outcome.scores
    return {
        "tasks": {
            name: {"samples": result.samples.tolist(), "scores": _plain(result.scores)}
            for name, result in scores.tasks.items()
        },
        "texts": {name: _plain(found) for name, found in scores.texts.items()},
        "recall": _plain(scores.recall),
        "answers": {name: [part.sums.tolist(), part.sizes.tolist()] for name, part in scores.answers.items()},
        "control": {name: [part.sums.tolist(), part.sizes.tolist()] for name, part in scores.control.items()},
        "bytes": scores.bytes,
        "speed": [point.to_dict() for point in scores.speed],
        "seconds": scores.seconds,
        "settings": outcome.settings,
    }


def _outcome(figures: dict[str, Any], suite: str) -> Outcome:
    """The inverse of `_figures`."""
    scores = ModelScores(
        tasks={
            name: TaskResult(np.asarray(result["samples"], dtype=np.float64), _scores(result["scores"]))
            for name, result in figures["tasks"].items()
        },
        texts={name: _scores(found) for name, found in figures["texts"].items()},
        recall=_scores(figures["recall"]),
        answers={name: _clusters(*part) for name, part in figures["answers"].items()},
        control={name: _clusters(*part) for name, part in figures["control"].items()},
        bytes=figures["bytes"],
        speed=[SpeedPoint(**point) for point in figures["speed"]],
        seconds=figures["seconds"],
    )
    settings = figures["settings"]
    return Outcome(scores, [task for task in SUITES[suite].tasks if task.name in settings["tasks"]], settings)


def _plain(scores: Mapping[str, Score]) -> dict[str, dict[str, Any]]:
    return {name: asdict(score) for name, score in scores.items()}


def _scores(values: Mapping[str, dict[str, Any]]) -> dict[str, Score]:
    return {name: Score(**value) for name, value in values.items()}


def _clusters(sums: list[float], sizes: list[int]) -> Clusters:
    return Clusters(np.asarray(sums, dtype=np.float64), np.asarray(sizes, dtype=np.int64))
