"""The table of `deltanet_recipes.benchmarks.end_to_end`'s results file, for readme_tables.py.

A line is a shape, a batch and a context length. Decoding times are those of the fastest mode of each kind; the ratio
behind a time or speed is to the teacher's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

KINDS = {"teacher": "teacher", "window25": "hybrid with windows", "hybrid25": "hybrid", "all": "pure"}

Rows = Sequence[dict[str, Any]]


def markdown(rows: Rows) -> str:
    """The table, and below it what could not be measured."""
    kinds = {kind: title for kind, title in KINDS.items() if any(row["kind"] == kind for row in rows)}
    headers = [f"{what}: {title}" for what in ("prompt, tokens/s", "step, ms", "cache, MB") for title in kinds.values()]
    lines = ["| shape, sequences x tokens | " + " | ".join(headers) + " |", "|---" * (len(headers) + 1) + "|"]
    points = list(dict.fromkeys((row["shape"], row["batch"], row["context"]) for row in rows if "error" not in row))
    for shape, batch, context in points:
        best = {kind: _best(rows, shape, batch, context, kind) for kind in kinds}
        cells = [_cell(best, "prefill_tokens_per_s", kind) for kind in kinds]
        cells += [_cell(best, "decode_ms", kind) for kind in kinds]
        cells += [f"{row['cache_mb']:,.0f}" if (row := best[kind]) else "-" for kind in kinds]
        lines.append(f"| {shape}, {batch} x {context:,} | " + " | ".join(cells) + " |")
    keys = ("shape", "kind", "mode", "batch", "context")
    failed = [
        f"not measured: {' '.join(str(row[key]) for key in keys)}: {row['error']}" for row in rows if "error" in row
    ]
    return "\n".join([*lines, *([""] if failed else []), *failed])


def _best(rows: Rows, shape: str, batch: int, context: int, kind: str) -> dict[str, Any] | None:
    """The row of the mode that decodes fastest."""
    labels = {"shape": shape, "batch": batch, "context": context, "kind": kind}
    found = [row for row in rows if "error" not in row and labels.items() <= row.items()]
    return min(found, key=lambda row: float(row["decode_ms"]), default=None)


def _cell(best: dict[str, dict[str, Any] | None], key: str, kind: str) -> str:
    row, teacher = best[kind], best["teacher"]
    if row is None:
        return "-"
    value = row[key]
    text = f"{value / 1e3:,.0f}k" if key != "decode_ms" and value >= 1e5 else f"{value / 1e3:.1f}k"
    if key == "decode_ms":
        text = f"{value:.2f}"
    if kind == "teacher" or teacher is None:
        return text
    times = value / teacher[key] if key != "decode_ms" else teacher[key] / value
    return f"{text} ({times:.2f}x)"
