"""Draws the error of each converted layer."""

from pathlib import Path
from typing import Any


def layer_error_plot(layers: list[dict[str, Any]], path: Path) -> None:
    """Draws relative MSE (bars) and cosine (line) of each converted layer's output into the PNG file `path`.

    Args:
        layers: one dict per converted layer with `index`, `relative_mse` and `cosine`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    indices = [layer["index"] for layer in layers]
    axes.bar(indices, [layer["relative_mse"] for layer in layers], color="#4c78a8", label="relative MSE")
    axes.plot(indices, [layer["cosine"] for layer in layers], "o-", color="#e45756", markersize=3, label="cosine")
    axes.axhline(1.0, color="grey", linewidth=0.6)
    axes.set(xlabel="decoder layer", title="Converted layers against the teacher's attention (held-out text)")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120, metadata={"Software": None})
