"""The plan for people: one line for each kind of layer, totals, and memory by context length."""

from rich.console import Console
from rich.table import Table

from ..conversion_plan import LayerPlan, Plan


def size(nbytes: int) -> str:
    """Bytes in decimal units, as disks and the hub count them."""
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def count(parameters: int) -> str:
    """Parameters in thousands, millions or billions."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if parameters >= unit:
            return f"{parameters / unit:.2f}{name}"
    return str(parameters)


def index_ranges(indices: list[int]) -> str:
    """Ascending layer indices in short: '0-2, 4, 6-7'."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def print_plan(plan: Plan, console: Console) -> None:
    """Prints what happens to each layer, what the result needs, and the caches by context."""
    layers = Table(title="Plan, per layer (parameters)", title_justify="left")
    layers.add_column("layers")
    layers.add_column("becomes")
    for column in ("copied", "expanded", "created", "dropped", "size"):
        layers.add_column(column, justify="right")
    alike: dict[tuple[object, ...], list[LayerPlan]] = {}
    for layer in plan.layers:
        alike.setdefault(_what(layer), []).append(layer)
    for members in alike.values():
        first = members[0]
        window = f" (window {first.window})" if first.window else ""
        kind = first.title if first.converted else f"stays softmax{window}{', q/k norms inserted' * first.normed}"
        numbers = [count(value) for value in (first.copied, first.expanded, first.created, first.dropped)]
        layers.add_row(index_ranges([m.index for m in members]), kind, *numbers, size(first.nbytes))
    console.print(layers)
    console.print(
        f"{count(plan.teacher_parameters)} parameters become {count(plan.parameters)}: "
        f"{size(plan.nbytes)} in "
        f"{plan.shards} {'file' if plan.shards == 1 else 'files'}; about {size(plan.peak_memory_bytes)} "
        f"of memory and {size(plan.disk_bytes)} of disk while converting"
    )
    caches = Table(title="Cache of one sequence, by context length", title_justify="left")
    for column in ("tokens", "teacher", "converted", "ratio"):
        caches.add_column(column, justify="right")
    for row in plan.cache_table():
        ratio = f"{row['teacher'] / row['converted']:.1f}x"
        caches.add_row(f"{row['context']:,}", size(row["teacher"]), size(row["converted"]), ratio)
    console.print(caches)


def _what(layer: LayerPlan) -> tuple[object, ...]:
    return (layer.kind, layer.window, layer.copied, layer.expanded, layer.created, layer.dropped)
