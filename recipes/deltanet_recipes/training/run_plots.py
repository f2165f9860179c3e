"""Plots of a run: loss, error per layer, KL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from deltanet_recipes.training.logbook import layer_errors


def draw_plots(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write loss.png, layers.png (alignment error per layer, before and after) and kl.png into `folder`.

    A plot without rows in the log is left out.
    """
    _curves(folder / "loss.png", rows, ("loss",), "loss")
    _layers(folder / "layers.png", rows)
    _curves(folder / "kl.png", rows, ("kl", "held_out.kl"), "KL to the teacher (nats per token)")


def _curves(path: Path, rows: list[dict[str, Any]], keys: tuple[str, ...], label: str) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for stage in dict.fromkeys(r["stage"] for r in rows if "." not in r["stage"]):  # STAGE.LAYER is one layer's
        for key in keys:
            points = [(r["tokens"], r[key]) for r in rows if r["stage"] == stage and key in r]
            if points:
                x, y = zip(*points, strict=True)
                axes.plot(x, y, marker="o" if key.startswith("held") else None, ms=3, label=f"{stage}: {key}")
    _finish(figure, axes, path, "tokens of the stage", label)


def _layers(path: Path, rows: list[dict[str, Any]]) -> None:
    first, last = layer_errors(rows)
    figure, axes = pyplot.subplots(figsize=(7, 4))
    if first:
        indices = sorted(first)
        axes.plot(indices, [first[i] for i in indices], "o-", ms=3, label="before alignment")
        axes.plot(indices, [last[i] for i in indices], "o-", ms=3, label="after")
        axes.set_ylim(bottom=0)
    _finish(figure, axes, path, "layer", "relative squared error, held out", log=False)


def _finish(figure: Any, axes: Any, path: Path, x: str, y: str, log: bool = True) -> None:
    if axes.lines:
        if log:
            axes.set_yscale("log")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        figure.tight_layout()
        figure.savefig(path, dpi=120)
    pyplot.close(figure)
