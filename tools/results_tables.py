"""Tables of rows of `measuring.study.results_row`, for readme_tables.py."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from deltanet_hf.errors import UserError
from measuring.markdown import Column, figure, lines, table
from measuring.rows import Row, RowFile

METRICS = {  # header -> metric, digits
    "wt2": ("wt2.perplexity", 2),
    "held-out Wikipedia": ("heldwiki.perplexity", 2),
    "KL to teacher": ("heldwiki.kl", 3),
    "other domain": ("anarchism.perplexity", 2),
    "exact repeat": ("repeat.perplexity", 2),
    "last word, seen": ("lastword.seen", 1),
    "last word, any": ("lastword.any", 1),
}
SELECTED = {  # of the headline
    "WikiText-2": ("wt2.perplexity", 1),
    "held-out Wikipedia": ("heldwiki.perplexity", 1),
    "KL to the teacher": ("heldwiki.kl", 3),
    "exact repeat": ("repeat.perplexity", 1),
}
NEEDLES = "needle_2048"


def results(rows: Iterable[Row]) -> str:
    """One line per run: tokens, seconds, and every metric with its standard error."""
    return lines(["run", "tokens", "seconds", *METRICS], map(_cells, rows))


def _cells(row: Row) -> list[str]:
    if "error" in row:
        return [row["run"], f"failed: {row['error']}", *[""] * (1 + len(METRICS))]
    seconds = f"{row['seconds']:.0f}" if row.get("seconds") else "-"
    metrics = [
        _score(row["metrics"][key], digits, *((100, "%") if key.startswith("lastword") else ()))
        for key, digits in METRICS.values()
    ]
    return [row["run"], f"{row['tokens']:,}", seconds, *metrics]


def headline(path: Path) -> str:
    """Selected rows and columns of several results files and of the JSON files of `deltanet-hf report`.

    They are described by YAML: {results: [FILE, ...], reports: [FILE, ...], columns: [NAME, ...], rows: [{run, label},
    ...]} with paths relative to itself. Without `columns`, the table has all of them.

    Raises UserError if it names a run that is in no results file.
    """
    layout = yaml.safe_load(path.read_text())
    rows = {row["run"]: row for name in layout["results"] for row in RowFile(path.parent / name).rows()}
    reports = [json.loads((path.parent / name).read_text()) for name in layout.get("reports", [])]
    models = {model["name"]: model for report in reports for model in report["models"]}
    for entry in layout["rows"]:
        if entry["run"] not in rows or "error" in rows[entry["run"]]:
            raise UserError(f"{path}: no measured run {entry['run']!r} in {', '.join(layout['results'])}")

    def metric(key: str, digits: int) -> Any:
        return lambda entry: _score(rows[entry["run"]]["metrics"].get(key), digits)

    def model(entry: dict[str, str]) -> dict[str, Any] | None:
        return models.get(entry.get("report", entry["run"]))

    columns = [Column("tokens trained", lambda entry: _millions(rows[entry["run"]]["tokens"]))]
    columns += [Column(header, metric(key, digits)) for header, (key, digits) in SELECTED.items()]
    if reports:
        suite = f"% of teacher, {reports[0]['settings']['suite']} suite"
        columns.append(Column(suite, lambda entry: _share(model(entry))))
        columns.append(Column("4 needles in 2,048 tokens, %", lambda entry: _needles(model(entry))))
    shown = layout.get("columns", [column.header for column in columns])
    by_name = {column.header: column for column in columns}
    return table([Column("", lambda entry: entry["label"]), *(by_name[name] for name in shown)], layout["rows"])


def _millions(tokens: int) -> str:
    return f"{tokens / 1e6:.1f}M" if tokens else "-"


def _share(model: dict[str, Any] | None) -> str:
    """Per cent of the teacher's score; a dash for a model that is in no report."""
    if model is None:
        return "-"
    return "100" if model["kind"] == "teacher" else _score(model["percent_of_teacher"], 1)


def _needles(model: dict[str, Any] | None) -> str:
    return "-" if model is None else _score(model["recall"].get(NEEDLES), 1, 100)


def _score(score: dict[str, float] | None, digits: int, scale: float = 1.0, unit: str = "") -> str:
    if score is None:
        return "-"
    return figure(scale * score["value"], scale * score["stderr"], digits, unit)
