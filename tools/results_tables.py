"""Tables of rows of `measuring/study/results_row.py` at commit 850a0947, for readme_tables.py."""

from __future__ import annotations

from collections.abc import Iterable

from measuring.markdown import figure, lines
from measuring.rows import Row

METRICS = {  # header -> metric, digits
    "wt2": ("wt2.perplexity", 2),
    "held-out Wikipedia": ("heldwiki.perplexity", 2),
    "KL to teacher": ("heldwiki.kl", 3),
    "other domain": ("anarchism.perplexity", 2),
    "exact repeat": ("repeat.perplexity", 2),
    "last word, seen": ("lastword.seen", 1),
    "last word, any": ("lastword.any", 1),
}


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


def _score(score: dict[str, float] | None, digits: int, scale: float = 1.0, unit: str = "") -> str:
    if score is None:
        return "-"
    return figure(scale * score["value"], scale * score["stderr"], digits, unit)
