"""Results of one task as a table, and the figures that plots share with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from deltanet_hf.errors import UserError
from measuring import markdown
from measuring.markdown import Column, figure

SOLVED = 0.99  # accuracy from which a seed counts as solved

Rows = Sequence[dict[str, Any]]
Model = tuple[tuple[str, int], Rows]
"""Name and head size, and the rows of all seeds."""

SETTINGS = {  # key of a row -> words
    "width": "width {}",
    "layers": "{} layers",
    "heads": "{} heads",
    "steps": "{:,} steps",
    "rate": "rate {:g}",
    "batch_tokens": "{:,} tokens/step",
    "decay": "weight decay {:g}",
}


def by_model(rows: Rows) -> dict[tuple[str, int], Rows]:
    """The rows of all seeds by (name, head size), in the order of their first occurrence.

    The name is the mixer, followed by those settings in which the rows differ.
    """
    varied = [key for key in SETTINGS if len({row[key] for row in rows if key in row}) > 1]
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        words = (SETTINGS[key].format(row[key]) for key in varied if key in row)
        found.setdefault((", ".join([row["mixer"], *words]), row["head_dim"]), []).append(row)
    return dict(found)


def mean_accuracy(rows: Rows) -> dict[int, float]:
    """Point -> mean over the seeds that did not diverge; empty without any."""
    curves = [dict(zip(row["points"], row["accuracy"], strict=True)) for row in rows if "error" not in row]
    return {point: sum(curve[point] for curve in curves) / len(curves) for point in (curves[0] if curves else ())}


def pairs_recalled(accuracy: dict[int, float]) -> float:
    """The largest number of pairs that a model gives back, over all loads."""
    return max((pairs * share for pairs, share in accuracy.items()), default=0.0)


def table(rows: Rows) -> str:
    """Markdown table: a line per mixer and head size, with the mean accuracy in per cent at each point.

    In word problems a cell is followed by the number of seeds with at least 99%, where there are several.
    """
    task = task_of(rows)
    points = sorted({point for row in rows for point in row.get("points", ())})
    recall = task == "mqar"
    seeds = max(len(group) for group in by_model(rows).values())

    def accuracy(model: Model, point: int) -> str:
        found = mean_accuracy(model[1])
        solved = sum(value >= SOLVED for value in values_at(model[1], point))
        seeds_solved = f" ({solved}/{len(model[1])})" if seeds > 1 and not recall else ""
        return figure(100 * found[point] if point in found else None) + seeds_solved

    columns = [
        Column("mixer", lambda model: model[0][0]),
        Column("head size", lambda model: str(model[0][1])),
        Column("KB", lambda model: f"{model[1][0]['bytes'] / 1e3:.1f}"),
        *(Column(str(point), accuracy, (point,)) for point in points),
        Column("pairs recalled", lambda model: f"{pairs_recalled(mean_accuracy(model[1])):.0f}")
        if recall
        else Column("level", lambda model: _levels(model[1])),
        Column("diverged", lambda model: str(sum("error" in row for row in model[1]))),
    ]
    return markdown.table(columns, by_model(rows).items())


def _levels(rows: Rows) -> str:
    """The mean level that training reached, of all."""
    reached = [row["level"] for row in rows if "level" in row]
    return f"{sum(reached) / len(reached):.0f} of {rows[0]['levels']}" if reached else "-"


def values_at(rows: Rows, point: int) -> Iterable[float]:
    """The accuracy of every seed at a point."""
    return (row["accuracy"][row["points"].index(point)] for row in rows if point in row.get("points", ()))


def task_of(rows: Rows) -> str:
    """The one task of all rows. Raises UserError if there are several or none."""
    tasks = sorted({row["task"] for row in rows})
    if len(tasks) != 1:
        raise UserError(f"results of {', '.join(tasks) or 'no task'}: one plot shows one task; give files of one task")
    return str(tasks[0])
