"""The rows of a benchmark as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from deltanet_hf.evaluation.speed.subjects import TEACHER

Row = dict[str, Any]
MEASURES = {
    "prefill_tokens_per_s": "prefill, tokens per second",
    "decode_ms": "decoding, ms per step",
    "cache_mb": "cache after the prompt, MB",
}


def table(rows: Sequence[Row]) -> Table:
    """One line per row; beside a teacher of the same shape, mode, batch and context, the factors against it."""
    teachers = {_setting(row): row for row in rows if row["kind"] == TEACHER}
    title = "Prefill and decoding (x: times the teacher's speed, or its cache)"
    shown = Table(title=title, title_justify="left", padding=(0, 0))  # fits 80 columns
    for column in ("shape", "kind", "mode"):
        shown.add_column(column)
    for column in ("batch", "context", "prefill tokens/s", "ms per step", "cache MB"):
        shown.add_column(column, justify="right")
    for row in rows:
        teacher = teachers.get(_setting(row)) if row["kind"] != TEACHER else None
        prefill, decode, cache = (
            f"{row['prefill_tokens_per_s']:,.0f}",
            f"{row['decode_ms']:.2f}",
            f"{row['cache_mb']:,.1f}",
        )
        if teacher is not None:
            prefill += f" ({row['prefill_tokens_per_s'] / teacher['prefill_tokens_per_s']:.2f}x)"
            decode += f" ({teacher['decode_ms'] / row['decode_ms']:.2f}x)"
            cache += f" ({row['cache_mb'] / teacher['cache_mb']:.2f}x)"
        names = (row["shape"], row["kind"], row["mode"], str(row["batch"]), f"{row['context']:,}")
        shown.add_row(*names, prefill, decode, cache)
    return shown


def _setting(row: Row) -> tuple[Any, ...]:
    return row["shape"], row["mode"], row["batch"], row["context"]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG file: a panel per measure over the context length, a line per model, mode and batch size."""
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(f"{row['shape']} {row['kind']}, {row['mode']}, batch {row['batch']}", []).append(row)
    figure = Figure(figsize=(17, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    contexts = sorted({row["context"] for row in rows})
    for index, (measure, label) in enumerate(MEASURES.items()):
        axes = figure.add_subplot(1, len(MEASURES), index + 1)
        for name, points in lines.items():
            style: dict[str, Any] = {"color": "black"} if points[0]["kind"] == TEACHER else {}
            found = sorted((point["context"], point[measure]) for point in points)
            axes.plot(*zip(*found, strict=True), label=name, marker="o", **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
        axes.set_xlabel("context, tokens")
        axes.set_ylabel(label)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=130)
