"""Prints a selection on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ..views.plan_view import shown_windows, size
from .allocation import Allocation
from .cache_sizes import SINKS
from .selection_file import Selection
from .task import SelectionTask
from .units import whole_heads


def print_selection(selection: Selection, task: SelectionTask, console: Console) -> None:
    """Prints the kept units in order with their scores, and for a budget in bytes what a sequence takes."""
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
    if task.spending is not None:
        _print_allocations(selection, task, console)
    if (sizes := task.sizes) is not None:
        used, whole = size(sizes.total(selection.kept, selection.planned_windows)), size(sizes.teacher_bytes)
        console.print(f"At {sizes.at:,} tokens a sequence takes {used}, the teacher's {whole}.", highlight=False)


def _print_allocations(selection: Selection, task: SelectionTask, console: Console) -> None:
    """The measured ways to spend the budget, and what each head gets by the best one."""
    console.print(f"Ways to spend the budget, measured on texts of {task.text_length:,} tokens", highlight=False)
    table = Table()
    for column in ("whole", "windows elsewhere", "cache", "KL", "score", ""):
        table.add_column(column, justify="right")
    for figures in selection.scores["allocations"]:
        found = Allocation.from_json(figures)
        score = "-" if found.score is None else f"{found.score:.3f}"
        cells = (str(found.kept), shown_windows(found.windows), size(found.nbytes), f"{found.kl:.4f}", score)
        is_taken = (found.kept, found.windows) == (len(selection.kept), selection.planned_windows)
        table.add_row(*cells, "taken" if is_taken else "")
    console.print(table)
    units = "layers" if selection.unit == "layer" else "key/value heads"
    whole = whole_heads(selection.kept, selection.local, selection.num_key_value_heads)
    layers: dict[int, list[str]] = {}
    for layer, window in enumerate(selection.planned_windows or ()):
        if len(whole.get(layer, ())) < selection.num_key_value_heads:
            layers.setdefault(window, []).append(str(layer))
    states = task.sizes is not None and task.sizes.kind.recurrent is not None
    console.print(
        f"The {units} of the first table keep all tokens; all others see the first {SINKS} and the last "
        + "; ".join(f"{window:,} in layers {', '.join(layers[window])}" for window in sorted(layers))
        + (", and have a state of what has left their window." if states else "."),
        highlight=False,
    )
