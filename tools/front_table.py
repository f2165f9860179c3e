"""Tables of rows of `measuring.study.front`, for readme_tables.py, with marks from the outcomes of single items.

A table is described by YAML: {results: FILE, columns: [NAME, ...], rows: [{run, label, baseline}, ...]} with FILE
relative to the YAML; `columns` as in hybrids_table.py. A row with a `baseline`, the run of another row, has **bold**
cells where it is better and *italic* ones where it is worse than that run by more than two standard errors of their
paired difference (`hybrid_row.compared`).
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from deltanet_hf.errors import UserError
from hybrids_table import HEADERS, _cell, _line
from measuring.study.front import load_items
from measuring.study.hybrid_row import compared


def front_table(path: Path) -> str:
    """The table that a YAML file describes. Raises UserError if it names a run that the results do not have."""
    layout = yaml.safe_load(path.read_text())
    results = path.parent / layout["results"]
    rows = {row["run"]: row for row in json.loads(results.read_text())}
    columns = layout["columns"]
    lines = ["| | " + " | ".join(HEADERS.get(name, name) for name in columns) + " |", "|---|" + "---|" * len(columns)]
    for entry in layout["rows"]:
        if entry["run"] not in rows:
            raise UserError(f"{path}: no measured run {entry['run']!r} in {results.name}")
        marks: dict[str, list[str]] = {}
        if baseline := entry.get("baseline"):
            marks = compared(load_items(results, entry["run"]), load_items(results, baseline))
        lines.append(_line(entry["label"], [_cell(rows[entry["run"]], names, marks) for names in columns]))
    return "\n".join(lines)
