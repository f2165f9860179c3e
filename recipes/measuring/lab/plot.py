"""Draws results: `python -m measuring.lab.plot RESULTS.json ... --out PLOT.png`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from deltanet_hf.errors import UserError, one_line
from deltanet_hf.exit_codes import run_command
from measuring.lab.presets import PRESETS
from measuring.lab.table import Rows, by_model, mean_accuracy, pairs_recalled, table, task_of

MARKERS = "osD^vPX*<>"
CHARACTERS = 16  # of the legend per inch


def plot(rows: Rows, title: str, path: Path) -> None:
    """Write a PNG file: accuracy against length, or for recall a panel per head size and pairs recalled against bytes.

    Thick lines are means over seeds, thin ones the seeds.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    recall = task_of(rows) == "mqar"
    groups = {key: group for key, group in by_model(rows).items() if mean_accuracy(group)}
    sizes = sorted({size for _, size in groups})
    if not recall and len(sizes) > 1:
        groups = {(f"{name}, head size {size}", size): group for (name, size), group in groups.items()}
    names = list(dict.fromkeys(name for name, _ in groups))
    panels = len(sizes) + 1 if recall else 1
    width = max(7.5, 3.6 * panels)
    columns = max(1, int(width * CHARACTERS) // (max(map(len, names)) + 8))
    legend = 0.2 * math.ceil((len(names) + 2) / columns)  # inches
    figure = Figure(figsize=(width, 3.8 + legend), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    style: dict[str, dict[str, Any]] = {
        name: {"color": colormaps["tab10"](place % 10), "marker": MARKERS[place % 10], "markersize": 4}
        for place, name in enumerate(names)
    }
    for axis, shown in zip(axes, [[size] for size in sizes] if recall else [sizes], strict=False):
        for (name, size), group in groups.items():
            if size in shown:
                _curve(axis, group, name, style[name])
        _lengths(axis, rows, recall)
        if recall:
            axis.set_title(f"head size {shown[0]}", fontsize=10)
    axes[0].set_ylabel("accuracy")
    if recall:
        for name in names:
            drawn = [groups[name, size] for size in sizes if (name, size) in groups]
            pairs = [pairs_recalled(mean_accuracy(group)) for group in drawn]
            axes[-1].plot([group[0]["bytes"] / 1e3 for group in drawn], pairs, **style[name])
        _doubling(axes[-1].xaxis, axes[-1].set_xscale)
        _doubling(axes[-1].yaxis, axes[-1].set_yscale)
        axes[-1].set_title("all head sizes", fontsize=10)
        axes[-1].set(xlabel="KB of a sequence of 512 tokens", ylabel="pairs recalled")
    figure.suptitle(title, fontsize=11)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=120, metadata={"Software": None})


def _curve(axis: Any, rows: Rows, label: str, style: dict[str, Any]) -> None:
    mean = mean_accuracy(rows)
    points = sorted(mean)
    axis.plot(points, [mean[point] for point in points], label=label, **style)
    seeds = [row for row in rows if "error" not in row]
    for row in seeds if len(seeds) > 1 else ():
        axis.plot(row["points"], row["accuracy"], color=style["color"], linewidth=0.7, alpha=0.5)


def _lengths(axis: Any, rows: Rows, recall: bool) -> None:
    """The axes of accuracy against length or pairs, with lines for chance and the longest length in training."""
    axis.axhline(rows[0]["chance"], color="grey", linewidth=0.9, linestyle="--", label="chance")
    if not recall:
        axis.axvline(rows[0]["trained"], color="black", linewidth=0.9, linestyle=":", label="longest in training")
    _doubling(axis.xaxis, axis.set_xscale)
    points = sorted({point for row in rows for point in row.get("points", ())})
    lowest = min([rows[0]["chance"], *(share for row in rows for share in row.get("accuracy", ()))])
    axis.set(xlabel="pairs" if recall else "length in tokens", xticks=points, ylim=(lowest - 0.03, 1.03))
    axis.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f}%")


def _doubling(axis: Any, set_scale: Callable[..., Any]) -> None:
    """A scale in powers of two with plain numbers."""
    set_scale("log", base=2)
    axis.set_major_formatter("{x:g}")
    axis.set_tick_params(which="minor", length=0)


def read_rows(files: list[Path]) -> list[dict[str, Any]]:
    """The rows of several results files. Raises UserError for a file that cannot be read."""
    rows: list[dict[str, Any]] = []
    for file in files:
        try:
            rows += json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{file}: cannot be read ({one_line(error)}); give a results file of this command"
            ) from None
    return rows


def main(
    files: Annotated[list[Path], typer.Argument(help="Results files of one task.")],
    out: Annotated[Path, typer.Option(help="PNG file to write.")],
    mixer: Annotated[list[str] | None, typer.Option(help="Only these, in this order; repeatable.")] = None,
) -> None:
    """Print the table and draw the plot of results from several files."""
    rows = read_rows(files)
    if mixer:
        if missing := sorted(set(mixer) - {row["mixer"] for row in rows}):
            raise UserError(f"--mixer {missing[0]}: not among the results of {', '.join(map(str, files))}")
        rows = [row for name in dict.fromkeys(mixer) for row in rows if row["mixer"] == name]
    print(table(rows))
    plot(rows, PRESETS[rows[0]["task"]].title, out)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
