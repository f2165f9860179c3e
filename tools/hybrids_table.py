"""Tables of rows of `measuring.study.hybrid_row`, for readme_tables.py.

A table is described by YAML: {results: FILE, columns: [NAME, ...], rows: [{run, label}, ...]} with FILE relative to the
YAML. `columns` are names of values, or several joined by spaces, which share a column. With `teacher: {mb_2k: NUMBER}`
the table begins with the teacher. Each free policy has one line, before the first trained row that is compared with it.
With `base: RUN` the cells are instead the changes from that run: KL and perplexity in percent, all others in points.

In a trained row, **bold** is better and *italic* is worse, by more than two standard errors, than the free policy with
the same layers and equal bytes (`ahead.free`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from deltanet_hf.errors import UserError

HEADERS = {
    "tokens": "tokens trained",
    "mb_2k": "MB",
    "mb_2k mb_32k": "MB at 2k / 32k",
    "kl_1k kl_4k kl_8k": "KL at 1k / 4k / 8k",
    "needles_2k": "needles in 2k, %",
    "prose_2k": "prose facts in 2k, %",
    "bigram": "bigram recall, %",
    "exact_repeat": "exact repeat",
    "wt2": "WikiText-2",
    "needles_1k needles_2k needles_4k": "needles in 1k / 2k / 4k, %",
    "prose_1k prose_2k prose_4k": "prose facts in 1k / 2k / 4k, %",
    "pairs_8": "8 pairs, %",
    "pairs_128": "128 pairs, %",
    "pairs_8 pairs_32 pairs_128": "8 / 32 / 128 pairs, %",
}
RELATIVE = ("kl_", "wt2", "exact_repeat")  # smaller is better; changes are given in percent


def hybrids_table(path: Path) -> str:
    """The table that a YAML file describes. Raises UserError if it names a run without figures."""
    layout = yaml.safe_load(path.read_text())
    rows = {row["run"]: row for row in json.loads((path.parent / layout["results"]).read_text())}
    columns = layout["columns"]
    lines = ["| | " + " | ".join(HEADERS.get(name, name) for name in columns) + " |", "|---|" + "---|" * len(columns)]
    shown: set[str] = set()
    for entry in layout["rows"]:
        row = rows.get(entry["run"])
        if row is None or "error" in row:
            raise UserError(f"{path}: no measured run {entry['run']!r} in {layout['results']}")
        if base := layout.get("base"):
            lines.append(_line(entry["label"], [_changes(row, rows[base], names) for names in columns]))
            continue
        if not shown and "teacher" in layout:
            teacher = {**teacher_figures(row), **layout["teacher"]}
            lines.append(_line("teacher", [_cell(teacher, names, {}) for names in columns]))
        for policy in (row["free_window"], row["free"]):
            if (label := policy_label(policy)) not in shown:
                lines.append(_line(f"free: {label}", [_cell(policy, names, {}) for names in columns]))
                shown.add(label)
        lines.append(_line(entry["label"], [_cell(row, names, row["ahead"]["free"]) for names in columns]))
    return "\n".join(lines)


def policy_label(policy: dict[str, Any]) -> str:
    """The name of a free policy, which says what stays softmax and how long the windows are."""
    layers, heads = policy["kept"], policy.get("kept_heads", ())
    if not layers and not heads:
        return f"window {policy['window']} in all layers"
    kept = [f"{'layer' if len(layers) == 1 else 'layers'} {', '.join(map(str, layers))}"] if layers else []
    kept += [f"{len(heads)} single heads"] if heads else []
    return f"{' and '.join(kept)} softmax, window {policy['window']} elsewhere"


def teacher_figures(row: dict[str, Any]) -> dict[str, float]:
    """The teacher's figures, from a model's share of them: share = (model - control) / (teacher - control)."""
    figures = {"kl_1k": 0.0, "kl_4k": 0.0, "kl_8k": 0.0, "bigram": 100.0}
    for name, share in row["relative"].items():
        if not name.endswith("_se") and share:
            control = row["cells"][name]["control"]
            figures[name] = control + (row["cells"][name]["exact"] - control) / share * 100
    return figures


def _cell(row: dict[str, Any], names: str, ahead: dict[str, list[str]]) -> str:
    parts = []
    for name in names.split():
        value, error = row.get(name), row.get(f"{name}_se")
        if value is None or (name == "tokens" and not value):
            parts.append("-")
            continue
        text = f"{value / 1e6:.1f}M" if name == "tokens" else f"{value:.{_digits(name)}f}"
        if error and " " not in names:
            text += f" ± {error:.{_digits(name)}f}"
        mark = "**" if name in ahead.get("better", ()) else "*" if name in ahead.get("worse", ()) else ""
        parts.append(f"{mark}{text}{mark}")
    return " / ".join(parts)


def _changes(row: dict[str, Any], base: dict[str, Any], names: str) -> str:
    parts = []
    for name in names.split():
        if name.startswith(RELATIVE):
            parts.append(f"{100 * (row[name] / base[name] - 1):+.0f}%")
        else:
            parts.append(f"{row[name] - base[name]:+.1f}")
    return " / ".join(parts)


def _digits(name: str) -> int:
    return 3 if name.startswith("kl_") else 2 if name == "exact_repeat" else 0 if name == "mb_32k" else 1


def _line(label: str, cells: list[str]) -> str:
    return f"| {label} | " + " | ".join(cells) + " |"
