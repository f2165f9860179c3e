"""The front of bytes against quality: `python tools/front_plot.py docs/images/front.png`.

Upper panels: memory of a sequence of 2,048 tokens. Lower panels: memory of 32,768 tokens, which is arithmetic, against
quality at the greatest length that was measured. The dashed line is the best that costs no training. The rows are those
of `measuring.study.front` with the first seed and without states: of models that differ in training alone, the one that
was trained longest, and of these the one with the least KL; of untrained ones, those on the line. Those with windows
and states are the rows of `measuring.study.state_rows` after 98.3M tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from deltanet_hf.evaluation.report.pareto import Point, draw_pareto, frontier
from deltanet_hf.exit_codes import run_command

RESULTS = Path(__file__).parents[1] / "recipes/results/smollm2-135m-front.json"
STATES = RESULTS.with_name("smollm2-135m-state.json")
LEAST_TOKENS = 9e6  # of training; rules are compared after less
EARLIER = ("-16-bit-tokens", "-even", "-mlp")  # in the names of rows of earlier caches and adapters
LABELS = {
    "teacher@4": "original, 4 bits",
    "states-5.3-98m": "ten heads",
    "states-3.1-98m": "six heads",
    "states-constant-4.6-98m": "no head",
}
KINDS = {  # colour, marker, and name in the legend
    "black": ("s", "original, cache of 16, 8, 4, 3 and 2 bits"),
    "tab:gray": ("x", "best before training: full-attention heads or layers, windows elsewhere"),
    "tab:orange": ("^", "the same, trained"),
    "tab:blue": ("o", "windows and states, trained"),
}
PANELS = [  # bytes, column, label, whether higher is better, distances in points from a labelled point to its label
    ("mb_2k", "kl_4k", "KL to original at 4,096 tokens, nats", False, [(44, 16), (-36, -34), (-14, -40), (-20, 44)]),
    ("mb_2k", "prose_2k", "prose facts found in 2,048 tokens, %", True, [(66, -22), (70, -62), (8, -84), (56, 16)]),
    ("mb_32k", "kl_8k", "KL to original at 8,192 tokens, nats", False, [(26, 26), (-48, -32), (-40, -36), (0, 40)]),
    ("mb_32k", "prose_4k", "prose facts found in 4,096 tokens, %", True, [(34, -44), (50, -40), (-20, 30), (56, -4)]),
]  # fmt: skip
AXES = {"mb_2k": "MB per sequence of 2,048 tokens", "mb_32k": "MB per sequence of 32,768 tokens"}


def main(
    out: Annotated[Path, typer.Argument(help="PNG file to write.")],
    results: Annotated[Path, typer.Option(help="Results file.")] = RESULTS,
) -> None:
    """Draw KL and retrieval against memory: original, untrained baselines, trained windows, and windows with states."""
    longest: dict[tuple[str, float, str], dict[str, Any]] = {}
    for row in json.loads(results.read_text()):
        short = 0 < row["tokens"] < LEAST_TOKENS
        if short or row["kind"] == "student" or row.get("seed") or any(name in row["run"] for name in EARLIER):
            continue
        model = row["kind"], row["mb_2k"], str([row.get("kept"), row.get("kept_heads")])
        longest[model] = max(longest.get(model, row), row, key=lambda row: (row["tokens"], -row["kl_4k"]))
    rows = {row["run"]: row for row in longest.values()}
    rows |= {
        row["run"]: row | {"kind": "student"}
        for row in json.loads(STATES.read_text())
        if row["tokens"] > 5e7 and "states" in row["run"]
    }
    figure = Figure(figsize=(8.5, 7.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (size, column, label, higher, distances) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        points = {
            run: Point(row["kind"], row[size], row[column], error(row, column))
            for run, row in rows.items()
            if higher or row[column] > 0
        }
        best = frontier([point for point in points.values() if point.kind in ("teacher", "free")], higher)
        if not higher:
            axes.set_yscale("log")
        shown = [point for point in points.values() if point.kind != "free" or point in best]
        draw_pareto(axes, shown, label, AXES[size], higher)
        for run, distance in zip([run for run in LABELS if run in points], distances, strict=True):
            axes.annotate(
                LABELS[run],
                (points[run].megabytes, points[run].value),
                distance,
                textcoords="offset points",
                ha="center",
                fontsize=9,
                arrowprops={"arrowstyle": "-", "linewidth": 0.7, "shrinkB": 4},
            )
        if not higher:
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle="", label=name)
        for colour, (marker, name) in KINDS.items()
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(out, dpi=140)


def error(row: dict[str, Any], column: str) -> float:
    """The standard error of a value in either file; 0 if unknown."""
    return row.get("stderr", {}).get(column) or row.get(f"{column}_se") or 0.0


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
