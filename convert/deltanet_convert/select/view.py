"""Prints a selection on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ..views.plan_view import size
from .budget import Memory
from .selection_file import Selection


def print_selection(selection: Selection, memory: Memory | None, candidates: int, console: Console) -> None:
    """Prints the kept units in order with their scores.

    Args:
        memory: bytes per sequence, for a budget in bytes.
        candidates: the number of units that were to choose from.
    """
    rounds = selection.scores.get("rounds")
    heads = selection.unit == "kv_head"
    # As a title, the line would be broken to the width of a narrow table.
    console.print(f"Units that stay softmax, the most important first ({selection.method})", highlight=False)
    table = Table()
    for column in ("place", "layer", *(["key/value head"] * heads), *(["score", "gain"] if rounds else [])):
        table.add_column(column, justify="right")
    before = 1.0
    for place, unit in enumerate(selection.order):
        figures: list[str] = []
        if rounds:
            score = rounds[place]["score"]
            figures, before = [f"{score:.3f}", f"{before - score:.3f}"], score
        table.add_row(str(place + 1), *map(str, unit), *figures)
    console.print(table)
    if rounds:
        console.print(
            f"Score: 0 is the teacher, 1 a window of {selection.settings['window']} tokens and "
            f"{selection.settings['sinks']} sinks everywhere. As many units evenly spread score "
            f"{selection.scores['uniform']:.3f}.",
            highlight=False,
        )
    if memory is not None:
        kept = len(selection.kept)
        console.print(
            f"At {memory.at:,} tokens a sequence takes {size(memory.total(kept, candidates))}, the teacher's "
            f"{size(memory.teacher)}.",
            highlight=False,
        )
