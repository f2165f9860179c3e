"""Markdown tables: columns are data, a header and what it shows of a row; figures are written in one way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple


class Column(NamedTuple):
    """A column of a table: its header, and the function that gives the text of a row's cell from the row and `of`."""

    header: str
    cell: Callable[..., str]
    of: tuple[Any, ...] = ()


def table(columns: Sequence[Column], rows: Iterable[Any]) -> str:
    """A table with one line per row."""
    cells = ([column.cell(row, *column.of) for column in columns] for row in rows)
    return "\n".join([_line([column.header for column in columns]), "|" + "---|" * len(columns), *map(_line, cells)])


def _line(cells: Iterable[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


def figure(value: float | None, error: float | None = None, digits: int = 1, unit: str = "") -> str:
    """`12,345.6 ± 0.7`, the unit after the value; a dash for None."""
    if value is None:
        return "-"
    return f"{value:,.{digits}f}{unit}" + ("" if error is None else f" ± {error:.{digits}f}")
