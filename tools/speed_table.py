"""The tables of `measuring.benchmarks.end_to_end`'s results file, for readme_tables.py.

Decoding times are those of the fastest mode of each kind of model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

KINDS = {"teacher": "teacher", "window25": "hybrid with windows", "hybrid25": "hybrid", "all": "pure"}

Rows = Sequence[dict[str, Any]]


def markdown(rows: Rows) -> str:
    """A line per shape, batch and context length, with ratios to the teacher; below it what could not be measured."""
    kinds = _kinds(rows)
    headers = [f"{what}: {title}" for what in ("prompt, tokens/s", "step, ms", "cache, MB") for title in kinds.values()]
    lines = ["| shape, sequences x tokens | " + " | ".join(headers) + " |", "|---" * (len(headers) + 1) + "|"]
    points = list(dict.fromkeys((row["shape"], row["batch"], row["context"]) for row in rows if "error" not in row))
    for shape, batch, context in points:
        best = {kind: _best(rows, shape, batch, context, kind) for kind in kinds}
        cells = [_cell(best, "prefill_tokens_per_s", kind) for kind in kinds]
        cells += [_cell(best, "decode_ms", kind) for kind in kinds]
        cells += [_figure(row, "cache_mb") if (row := best[kind]) else "-" for kind in kinds]
        lines.append(f"| {shape}, {batch} x {context:,} | " + " | ".join(cells) + " |")
    keys = ("shape", "kind", "mode", "batch", "context")
    failed = [
        f"not measured: {' '.join(str(row[key]) for key in keys)}: {row['error']}" for row in rows if "error" in row
    ]
    return "\n".join([*lines, *([""] if failed else []), *failed])


def _kinds(rows: Rows) -> dict[str, str]:
    """Kind -> title, of those that have rows."""
    return {kind: title for kind, title in KINDS.items() if any(row["kind"] == kind for row in rows)}


def _best(rows: Rows, shape: str, batch: int, context: int, kind: str) -> dict[str, Any] | None:
    """The row of the mode that decodes fastest."""
    labels = {"shape": shape, "batch": batch, "context": context, "kind": kind}
    found = [row for row in rows if "error" not in row and labels.items() <= row.items()]
    return min(found, key=lambda row: float(row["decode_ms"]), default=None)


def _cell(best: dict[str, dict[str, Any] | None], key: str, kind: str) -> str:
    row, teacher = best[kind], best["teacher"]
    if row is None:
        return "-"
    text = _figure(row, key)
    if kind == "teacher" or teacher is None:
        return text
    times = row[key] / teacher[key] if key != "decode_ms" else teacher[key] / row[key]
    return f"{text} ({times:.2f}x)"


def _figure(row: dict[str, Any], key: str) -> str:
    value = row[key]
    if key == "decode_ms":
        return f"{value:.2f}"
    if key == "cache_mb":
        return f"{value:,.0f}"
    return f"{value / 1e3:,.0f}k" if value >= 1e5 else f"{value / 1e3:.1f}k"
