"""Draws results: `python -m deltanet_recipes.lab.plot RESULTS.json ... --out PLOT.png`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from deltanet_hf.errors import UserError, one_line
from deltanet_hf.exit_codes import run_command
from deltanet_recipes.lab.presets import PRESETS
from deltanet_recipes.lab.table import Rows, by_model, mean_accuracy, pairs_recalled, table, task_of, values_at


def plot(rows: Rows, title: str, path: Path) -> None:
    """Write a PNG file: accuracy against length, or for recall a panel per head size and pairs recalled against bytes.

    Lines are means over seeds, with a band from the worst to the best. The dotted line is the longest length in
    training, the grey one chance.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    recall = task_of(rows) == "mqar"
    groups = {key: group for key, group in by_model(rows).items() if mean_accuracy(group)}
    mixers = list(dict.fromkeys(mixer for mixer, _ in groups))
    sizes = sorted({size for _, size in groups})
    panels = len(sizes) + recall
    columns = min(len(mixers), 5 if recall else 2)
    legend = 0.2 * math.ceil(len(mixers) / columns)  # inches
    figure = Figure(figsize=(max(7.5, 3.6 * panels), 3.8 + legend), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    style = {
        mixer: {"color": colormaps["tab10"](place % 10), "linestyle": ("-", "--", ":", "-.")[place // 10 % 4]}
        for place, mixer in enumerate(mixers)
    }
    for axis, size in zip(axes, sizes, strict=False):
        for mixer in mixers:
            if group := groups.get((mixer, size)):
                _curve(axis, group, mixer, style[mixer])
        axis.axhline(rows[0]["chance"], color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.set(xlabel="pairs" if recall else "length in tokens", ylim=(-0.02, 1.03))
        if len(sizes) > 1:
            axis.set_title(f"head size {size}", fontsize=10)
        if not recall:
            axis.axvline(rows[0]["trained"], color="black", linewidth=0.8, linestyle=":")
    axes[0].set_ylabel("accuracy")
    if recall:
        for mixer in mixers:
            drawn = [groups[mixer, size] for size in sizes if (mixer, size) in groups]
            pairs = [pairs_recalled(mean_accuracy(group)) for group in drawn]
            axes[-1].plot([group[0]["bytes"] / 1e3 for group in drawn], pairs, marker="o", markersize=3, **style[mixer])
        axes[-1].set_xscale("log", base=2)
        axes[-1].set_yscale("log", base=2)
        axes[-1].xaxis.set_major_formatter("{x:g}")
        axes[-1].yaxis.set_major_formatter("{x:g}")
        axes[-1].set(xlabel="KB of a sequence of 512 tokens", ylabel="pairs recalled")
    figure.suptitle(title, fontsize=11)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=120, metadata={"Software": None})


def _curve(axis: Any, rows: Rows, label: str, style: dict[str, Any]) -> None:
    mean = mean_accuracy(rows)
    points = sorted(mean)
    axis.plot(points, [mean[point] for point in points], marker="o", markersize=3, label=label, **style)
    spread = [list(values_at(rows, point)) for point in points]
    axis.fill_between(points, list(map(min, spread)), list(map(max, spread)), color=style["color"], alpha=0.12)


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
