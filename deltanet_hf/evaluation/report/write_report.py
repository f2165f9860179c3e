"""Writes a report: a teacher, its students and untrained baselines in one table, with figures and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from deltanet_hf.cpu_dtype import check_dtype
from deltanet_hf.errors import QualityError, UserError
from deltanet_hf.evaluation.measures.relative import relative_score
from deltanet_hf.evaluation.measures.scores import Score
from deltanet_hf.evaluation.report.bench import Outcome, measure_rows
from deltanet_hf.evaluation.report.figures import write_figures
from deltanet_hf.evaluation.report.markdown import markdown
from deltanet_hf.evaluation.report.material import ReportOptions
from deltanet_hf.evaluation.report.model_rows import BASELINES, ModelRow, line_up, named
from deltanet_hf.evaluation.report.model_scores import ModelScores
from deltanet_hf.evaluation.report.teacher_share import percent_of_teacher
from deltanet_hf.evaluation.report.unfinished import Unfinished
from deltanet_hf.evaluation.tasks.suites import SUITES, check_packages
from deltanet_hf.file_lock import locked
from deltanet_hf.hub import loadable_folder
from deltanet_hf.loading import load_config, load_tokenizer
from deltanet_hf.safe_write import write_atomically, writing


@dataclass
class Row:
    """A model of the report with its scores; `percent` is its share of the teacher's task scores, if known."""

    model_row: ModelRow
    scores: ModelScores
    percent: Score | None = None


def run_report(options: ReportOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure every model and write report.md, report.json and the figures into `options.out`; returns the JSON.

    report.md and report.json are rewritten after each model. After an interruption, the same call measures the models
    that are missing.

    Args:
        say: receives lines of progress.

    Raises UserError for an unknown suite, baseline or dtype, for models or inputs that cannot be used, and if another
    process is writing into `options.out`, or the disk refuses to.
    """
    if options.suite not in SUITES:
        raise UserError(f"--suite {options.suite}: unknown; choose one of {', '.join(SUITES)}")
    check_packages(options.suite)
    if unknown := sorted(set(options.baselines) - set(BASELINES)):
        raise UserError(f"--baselines {unknown[0]}: unknown; choose from {', '.join(BASELINES)}")
    check_dtype(options.dtype)
    vocabulary: dict[str, int] | None = None
    for name in (options.teacher, *(named(text)[1] for text in options.students)):
        folder = loadable_folder(name)
        load_config(name, folder)  # hours may pass until the last one is measured
        found = load_tokenizer(name, folder).get_vocab()
        if found != (vocabulary := vocabulary or found):
            raise UserError(f"{name}: its tokenizer differs from the teacher's; a report uses one tokenizer")
    model_rows = line_up(options.teacher, options.students, options.baselines)
    with locked(options.out / ".lock", options.out, "report"):
        return _run_report(options, model_rows, say)


def _run_report(options: ReportOptions, model_rows: list[ModelRow], say: Callable[[str], None]) -> dict[str, Any]:
    unfinished = Unfinished(options, model_rows, say)
    before = unfinished.outcomes
    outcomes = chain(before, measure_rows(options, model_rows, say, len(before)))
    rows: list[Row] = []
    document: dict[str, Any] = {}
    try:
        for number, (model_row, outcome) in enumerate(zip(model_rows, outcomes, strict=True)):
            if number >= len(before):
                unfinished.add(model_row, outcome)
            row = Row(model_row, outcome.scores)
            rows.append(row)
            if outcome.tasks:
                row.percent = percent_of_teacher(row.scores.tasks, rows[0].scores.tasks, outcome.tasks)
            document = _document(rows, outcome)
            write_atomically(options.out / "report.json", json.dumps(document, indent=1).encode())
            write_atomically(options.out / "report.md", markdown(document).encode())
    except (UserError, QualityError):
        if not rows:  # nothing worth continuing
            unfinished.remove()
        raise
    with writing(options.out):
        write_figures(document, options.out)
    unfinished.remove()
    return document


def _document(rows: list[Row], last: Outcome) -> dict[str, Any]:
    counts = {name: len(result.samples) for name, result in rows[0].scores.tasks.items()}
    teacher = rows[0].scores

    def kept(scores: ModelScores) -> dict[str, dict[str, float | None]]:
        """Recall relative to the teacher, of the probes that can show it."""
        own, taught, control = (measured.clusters for measured in (scores.recall, teacher.recall, teacher.control))
        found = {name: relative_score(own[name], taught[name], control[name]) for name in teacher.control.probes}
        return {name: score.to_dict() for name, score in found.items() if score is not None}

    return {
        "settings": {**last.settings, "rows": counts},
        "models": [
            {
                "name": row.model_row.name,
                "kind": row.model_row.kind,
                "folder": Path(row.model_row.folder).name,
                "training_tokens": row.model_row.tokens,
                "percent_of_teacher": row.percent.to_dict() if row.percent else None,
                "recall_of_teacher": kept(row.scores),
                **row.scores.to_dict(),
            }
            for row in rows
        ],
    }
