"""Tables of models compared with others, for readme_tables.py.

A table is described by YAML: {results: FILE, columns: [NAME, ...], rows: [{run, label}, ...]} with FILE relative to the
YAML; a row may name a `results` of its own. `columns` are names of values, or several joined by spaces, which share a
column. A cell is **bold** where the row is better than its baseline, and *italic* where it is worse, by more than two
standard errors of their difference.

- `front`: rows of `measuring.study.state_rows`, or of `measuring.study.front` at commit bdedce8a; `baseline` of a row
  names the run that it is compared with, by the outcomes of single items.
- `changes`: rows of `measuring.study` at commit 850a0947, as changes from the run `base`: KL and perplexity in
  percent, all others in points.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.measures.measure import Measured
from deltanet_hf.evaluation.measures.relative import paired_difference
from measuring.markdown import Column, figure, table
from measuring.rows import Row, RowFile
from measuring.study.items import load_items
from measuring.study.task_suites import COLUMNS

HEADERS = {
    "tokens": "tokens trained",
    "mb_2k mb_32k": "MB at 2k / 32k",
    "mb_2k mb_8k": "MB at 2k / 8k",
    "kl_1k kl_4k kl_8k": "KL at 1k / 4k / 8k",
    "kl_4k kl_8k kl_16k kl_32k": "KL at 4k / 8k / 16k / 32k",
    "needles_2k": "needles in 2k, %",
    "prose_2k": "prose facts in 2k, %",
    "needles_2k prose_2k": "needles / prose facts in 2k, %",
    "bigram": "bigram recall, %",
    "exact_repeat": "exact repeat",
    "wt2": "WikiText-2",
    "needles_1k needles_2k needles_4k": "needles in 1k / 2k / 4k, %",
    "prose_1k prose_2k prose_4k": "prose facts in 1k / 2k / 4k, %",
    "needles_4k needles_8k needles_16k needles_32k": "needles in 4k / 8k / 16k / 32k, %",
    "prose_4k prose_8k prose_16k prose_32k": "prose facts in 4k / 8k / 16k / 32k, %",
    "top1": "top-1 agreement, %",
    "niah_2k niah_4k niah_8k": "RULER NIAH in 2k / 4k / 8k, %",
    "niah_4k niah_8k niah_16k niah_32k": "RULER NIAH in 4k / 8k / 16k / 32k, %",
    "niah_4k niah_16k niah_32k": "RULER NIAH in 4k / 16k / 32k, %",
    "vt_4k": "RULER VT in 4k, %",
    "completion": "SQuAD completion, %",
    "ifeval": "IFEval, %",
    "standard": "standard suite, %",
    "humaneval": "HumanEval, %",
    "mbpp": "MBPP, %",
    "gsm8k": "GSM8K, %",
    "tokens_per_s": "tokens/s",
    "pairs_128": "128 pairs, %",
}
RELATIVE = ("kl_", "wt2", "exact_repeat")  # smaller is better; changes are given in percent
KL = ("kl_1k", "kl_4k", "kl_8k", "kl_16k", "kl_32k")
RECALL = (
    *(f"{name}_{length}" for name in ("needles", "prose") for length in ("1k", "2k", "4k", "8k", "16k", "32k")),
    *("pairs_8", "pairs_32", "pairs_128"),
)
SHARES = {"top1": "top1_4k"} | {name: name for name in (*RECALL, *COLUMNS)}
"""Column in per cent -> the clusters that it comes from."""
PERPLEXITIES = {"exact_repeat": "loss_repeat", "wt2": "loss_wt2"}
CLEAR = 2.0  # standard errors
Ahead = dict[str, list[str]]


class Line(NamedTuple):
    """A line of a table: its label, the figures, and the columns in which they are better and worse."""

    label: str
    row: Row
    ahead: Ahead


def changes(path: Path) -> str:
    """The table that a YAML file describes. Raises UserError if it names a run without figures."""
    layout, row_of = _read(path)
    base = row_of({"run": layout["base"]})
    lines = [Line(entry["label"], row_of(entry), {}) for entry in layout["rows"]]
    return _table(layout, lines, lambda line, names: _changes(line.row, base, names))


def front(path: Path) -> str:
    """The table that a YAML file describes; nothing while the results are not there. ‡ marks rows of caches in which
    the tokens that are not packed had 16 bits.

    Raises UserError if it names a run that the results do not have.
    """
    results = path.parent / yaml.safe_load(path.read_text())["results"]
    if not results.exists():
        return ""
    layout, row_of = _read(path)
    items = load_items(results)

    def ahead(run: str, baseline: str | None) -> Ahead:
        return compared(items[run], items[baseline]) if baseline else {}

    def line(entry: dict[str, str]) -> Line:
        row = row_of(entry)
        label = entry["label"] + " ‡" * (row.get("unpacked_bits") == 16)
        return Line(label, row, ahead(entry["run"], entry.get("baseline")))

    return _table(layout, [line(entry) for entry in layout["rows"]], _cell)


def compared(student: Measured, policy: Measured) -> Ahead:
    """The columns in which the student is better and worse than a policy by more than two standard errors."""
    better, worse = [], []
    for name in (*KL, *SHARES, "bigram", *PERPLEXITIES):
        source = (SHARES | PERPLEXITIES).get(name, name)
        if source not in student.clusters or source not in policy.clusters:
            continue
        difference = paired_difference(student.clusters[source], policy.clusters[source])
        gain = -difference.value if name in KL or name in PERPLEXITIES else difference.value
        if gain > CLEAR * difference.stderr:
            better.append(name)
        elif -gain > CLEAR * difference.stderr:
            worse.append(name)
    return {"better": better, "worse": worse}


def _read(path: Path) -> tuple[dict[str, Any], Callable[[dict[str, str]], Row]]:
    """The layout, and a function that gives the row of an entry or raises UserError if there is none."""
    layout = yaml.safe_load(path.read_text())
    files = {entry.get("results", layout["results"]) for entry in layout["rows"]}
    measured = {
        file: {row["run"]: row for row in RowFile(path.parent / file).rows() if "error" not in row} for file in files
    }

    def row_of(entry: dict[str, str]) -> Row:
        file, run = entry.get("results", layout["results"]), entry["run"]
        if run not in measured[file]:
            raise UserError(f"{path}: no measured run {run!r} in {file}")
        return measured[file][run]

    return layout, row_of


def _table(layout: dict[str, Any], lines: list[Line], cell: Callable[[Line, str], str]) -> str:
    columns = [Column(HEADERS.get(names, names), cell, (names,)) for names in layout["columns"]]
    return table([Column("", lambda line: line.label), *columns], lines)


def _cell(line: Line, names: str) -> str:
    parts = []
    for name in names.split():
        value, error = line.row.get(name), line.row.get(f"{name}_se", line.row.get("stderr", {}).get(name))
        if value is None or (name == "tokens" and not value):
            parts.append("-")
            continue
        text = f"{value / 1e6:.1f}M"
        if name != "tokens":
            text = figure(value, (error or None) if " " not in names else None, _digits(name, value))
        mark = "**" if name in line.ahead.get("better", ()) else "*" if name in line.ahead.get("worse", ()) else ""
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


def _digits(name: str, value: float) -> int:
    if name.startswith("kl_"):
        return 3 if value >= 0.1 else 4
    if name == "mb_32k":
        return 0 if value >= 10 else 1
    return {"exact_repeat": 2, "tokens_per_s": 0}.get(name, 1)
