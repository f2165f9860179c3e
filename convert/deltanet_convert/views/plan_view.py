"""Prints a plan: one line per kind of layer, totals, and cache sizes by context length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ..conversion_plan import LayerPlan, Plan

PARAMETERS = ("copied", "expanded", "created", "dropped")  # numbers in a plan; a column each, if not all 0


def shown_windows(windows: Sequence[int]) -> str:
    """The shortest and the longest, as one number where they are the same."""
    return f"{min(windows):,}" if len(set(windows)) == 1 else f"{min(windows):,} to {max(windows):,}"


def size(nbytes: int) -> str:
    """Formats a number of bytes in decimal units, as disks and the hub do."""
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def count(parameters: int) -> str:
    """Formats a number of parameters in thousands, millions or billions."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if parameters >= unit:
            return f"{parameters / unit:.2f}{name}"
    return str(parameters)


def index_ranges(indices: list[int]) -> str:
    """Abbreviates ascending layer indices: '0-2, 4, 6-7'."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def print_plan(plan: Plan, console: Console) -> None:
    """Prints the plan of each layer, the sizes of the result, and the cache sizes by context length."""
    counted = [name for name in PARAMETERS if name == "copied" or any(getattr(layer, name) for layer in plan.layers)]
    layers = Table(title="Plan (parameters, bytes and cache of one sequence, per layer)", title_justify="left")
    layers.add_column("layers")
    layers.add_column("become")
    for column in (*counted, "weights"):
        layers.add_column(column, justify="right", no_wrap=True)
    layers.add_column("cache", justify="right")
    alike: dict[tuple[object, ...], list[LayerPlan]] = {}
    for layer in plan.layers:
        alike.setdefault(_shown(layer), []).append(layer)
    for members in alike.values():
        first = members[0]
        window = f" (window {first.window})" if first.window else ""
        kept = f"stays softmax{window}{', q/k norms inserted' * first.normed}"
        numbers = [count(getattr(first, name)) for name in counted]
        layers.add_row(
            index_ranges([member.index for member in members]),
            first.title if first.converted else kept,
            *numbers,
            size(first.nbytes),
            _cache(first),
        )
    console.print(layers)
    small = " (most of it libraries)" if plan.peak_memory_bytes < 10**9 else ""
    console.print(
        f"{count(plan.teacher_parameters)} parameters become {count(plan.parameters)}: {size(plan.nbytes)} in "
        f"{plan.shards} {'file' if plan.shards == 1 else 'files'}; about {size(plan.peak_memory_bytes)} of memory"
        f"{small} and {size(plan.disk_bytes)} of disk while converting"
    )
    bits = f" (converted: keys and values in {plan.cache_bits} bits)" if plan.cache_bits < 16 else ""
    caches = Table(title=f"Cache of one sequence, by context length{bits}", title_justify="left")
    for column in ("tokens", "teacher", "converted", "ratio"):
        caches.add_column(column, justify="right")
    for row in plan.cache_bytes:
        ratio = f"{row['teacher'] / row['converted']:.1f}x"
        caches.add_row(f"{row['context']:,}", size(row["teacher"]), size(row["converted"]), ratio)
    console.print(caches)
    if (positions := plan.positions) is not None:
        console.print(
            f"Reads {positions.context:,} tokens, the teacher {positions.teacher:,}: full-attention heads have "
            f"{positions.title}, windows and states the teacher's positions",
            highlight=False,
        )


def _cache(layer: LayerPlan) -> str:
    """The cache of one sequence: what has a fixed size, and what grows."""
    grows = f"{size(layer.kept_kv_bytes_per_token)} per token" if layer.kept_kv_bytes_per_token else ""
    return " + ".join(part for part in (size(layer.state_bytes) if layer.state_bytes else "", grows) if part)


def _shown(layer: LayerPlan) -> tuple[object, ...]:
    """Everything that a row shows; layers with equal values share a row."""
    counts = (layer.copied, layer.expanded, layer.created, layer.dropped, layer.nbytes, layer.state_bytes)
    return (layer.title, layer.normed, None if layer.converted else layer.window, *counts)
