"""The tables of `measuring.benchmarks.end_to_end`'s results file, for readme_tables.py.

Decoding times are those of the fastest mode of each kind of model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring.benchmarks.end_to_end import KEY
from measuring.markdown import Column, table
from measuring.rows import RowFile

FIGURES = {"prompt, tokens/s": "prefill_tokens_per_s", "step, ms": "decode_ms", "cache, MB": "cache_mb"}
KINDS = {
    "transformers": "teacher in transformers",
    "teacher": "teacher",
    "teacher4bit": "teacher, 4 bits",
    "by_layer": "converted",
    "windows4bit": "every fourth layer, windows",
    "hybrid25": "states, 16 bits",
    "window25": "windows and states, 16 bits",
    "window25_4bit": "windows and states, 4 bits",
}

POINT = Column("shape, sequences x tokens", lambda line: "{}, {} x {:,}".format(*line["point"]))

Rows = Sequence[dict[str, Any]]


def speed(path: Path) -> str:
    """A table per figure, with a line per shape, batch and context length and a column per kind of model."""
    rows = RowFile(path, KEY, head={}).rows()
    kinds, lines = _kinds(rows), _lines(rows)
    parts = []
    for what, key in FIGURES.items():
        columns = [POINT, *(Column(title, _cell, (key, kind)) for kind, title in kinds.items())]
        parts.append(f"{what[0].upper()}{what[1:]}:\n\n{table(columns, lines)}")
    return "\n\n".join(parts)


def recommended(path: Path) -> str:
    """One table of 8B: a line for what `convert` makes and for each form of its teacher, all figures of a point in a
    column."""
    rows = [row for row in RowFile(path, KEY, head={}).rows() if row["shape"] == "8B"]
    points = _lines(rows)
    columns = [Column(f"8B: {'; '.join(FIGURES)}", lambda kind: KINDS[kind])]
    columns += [Column("{1} x {2:,}".format(*point["point"]), _all_of, (point,)) for point in points]
    return table(columns, ("teacher", "teacher4bit", "by_layer"))


def _all_of(kind: str, point: dict[str, Any]) -> str:
    return "; ".join(_cell(point, key, kind) for key in FIGURES.values())


def _lines(rows: Rows) -> list[dict[str, Any]]:
    """Of each point that was measured, the row of each kind."""
    points = list(dict.fromkeys((row["shape"], row["batch"], row["context"]) for row in rows if "error" not in row))
    return [{"point": point, **{kind: _best(rows, *point, kind) for kind in _kinds(rows)}} for point in points]


def _kinds(rows: Rows) -> dict[str, str]:
    """Kind -> title, of those that have rows."""
    return {kind: title for kind, title in KINDS.items() if any(row["kind"] == kind for row in rows)}


def _best(rows: Rows, shape: str, batch: int, context: int, kind: str) -> dict[str, Any] | None:
    """The row of the mode that decodes fastest."""
    labels = {"shape": shape, "batch": batch, "context": context, "kind": kind}
    found = [row for row in rows if "error" not in row and labels.items() <= row.items()]
    return min(found, key=lambda row: float(row["decode_ms"]), default=None)


def _cell(line: dict[str, Any], key: str, kind: str) -> str:
    return "-" if line[kind] is None else _figure(line[kind], key)


def _figure(row: dict[str, Any], key: str) -> str:
    value = row[key]
    if key == "decode_ms":
        return f"{value:.2f}"
    if key == "cache_mb":
        return f"{value:,.0f}"
    return f"{value / 1e3:,.0f}k" if value >= 1e5 else f"{value / 1e3:.1f}k"
