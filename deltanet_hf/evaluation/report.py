"""`deltanet-hf report`: a teacher, its students and untrained baselines in one table, with plots and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.average import percent_of_teacher
from deltanet_hf.evaluation.bench import Outcome, ReportOptions, measure_rows
from deltanet_hf.evaluation.contestants import BASELINES, Contestant, line_up
from deltanet_hf.evaluation.measure import Measured
from deltanet_hf.evaluation.plots import write_plots
from deltanet_hf.evaluation.suite import SUITES
from deltanet_hf.evaluation.table import markdown


@dataclass
class Row:
    contestant: Contestant
    measured: Measured
    percent: Any = None


def run_report(options: ReportOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure every model and write report.md, report.json and the plots into `options.out`; returns the JSON.

    Files are rewritten after each model, so an interrupted run leaves what it finished.
    """
    if options.suite not in SUITES:
        raise UserError(f"--suite {options.suite}: unknown; choose one of {', '.join(SUITES)}")
    if unknown := sorted(set(options.baselines) - set(BASELINES)):
        raise UserError(f"--baselines {unknown[0]}: unknown; choose from {', '.join(BASELINES)}")
    contestants = line_up(options.teacher, options.students, options.baselines)
    rows: list[Row] = []
    document: dict[str, Any] = {}
    for contestant, outcome in zip(contestants, measure_rows(options, contestants, say), strict=True):
        row = Row(contestant, outcome.measured)
        rows.append(row)
        if outcome.tasks:
            row.percent = percent_of_teacher(row.measured.tasks, rows[0].measured.tasks, outcome.tasks)
        document = _document(rows, outcome)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "report.json").write_text(json.dumps(document, indent=1))
        (options.out / "report.md").write_text(markdown(document))
    write_plots(document, options.out)
    return document


def _document(rows: list[Row], last: Outcome) -> dict[str, Any]:
    counts = {name: len(result.samples) for name, result in rows[0].measured.tasks.items()}
    return {
        "settings": {**last.settings, "rows": counts},
        "models": [
            {
                "name": row.contestant.name,
                "kind": row.contestant.kind,
                "folder": Path(row.contestant.folder).name,
                "training_tokens": row.contestant.tokens,
                "percent_of_teacher": row.percent.to_dict() if row.percent else None,
                **row.measured.to_dict(),
            }
            for row in rows
        ],
    }
