"""The front of bytes against quality: `python tools/front_plot.py docs/images/front.png`.

Upper panels: memory of a sequence of 2,048 tokens. Lower panels: memory of 32,768 tokens, which is arithmetic, against
quality at the greatest length that was measured. The dashed line is the best that costs no training. The rows are those
of `measuring.study.front`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from deltanet_hf.evaluation.report.pareto import Point, draw_pareto
from deltanet_hf.exit_codes import run_command

RESULTS = Path(__file__).parents[1] / "recipes/results/smollm2-135m-front.json"
LABELS = {
    "teacher@16": "16 bits",
    "teacher@8": "8",
    "teacher@4": "4",
    "teacher@3": "3",
    "teacher@2": "2",
    "seven-97-60m@4": "60M tokens",
    "control-heads18-897@4": "18 heads",
    "control-heads9-481@4": "9 heads",
    "control-heads9-225@4": "9 heads",
    "control-heads9-481-100m@4": "98M tokens",
    "control-heads18-897-100m@4": "98M tokens",
    "heads9-353-100m@4": "98M tokens",
}
KINDS = {  # colour and name in the legend
    "black": "teacher, bits of its cache",
    "tab:gray": "without training: some layers or heads whole, windows elsewhere, 2 to 16 bits",
    "tab:orange": "windows, trained, 4 bits (two in 16)",
    "tab:blue": "windows + Gated DeltaNet, trained, 4 bits (one in 16)",
}
PANELS = [  # bytes, column, label, whether higher is better
    ("mb_2k", "kl_4k", "KL to the teacher at 4,096 tokens, nats", False),
    ("mb_2k", "prose_2k", "prose facts found in 2,048 tokens, %", True),
    ("mb_32k", "kl_8k", "KL to the teacher at 8,192 tokens, nats", False),
    ("mb_32k", "needles_4k", "needles found in 4,096 tokens, %", True),
]
AXES = {"mb_2k": "MB per sequence of 2,048 tokens", "mb_32k": "MB per sequence of 32,768 tokens"}


def main(
    out: Annotated[Path, typer.Argument(help="PNG file to write.")],
    results: Annotated[Path, typer.Option(help="Results file.")] = RESULTS,
) -> None:
    """Draw KL and retrieval against memory: teacher, untrained baselines, trained controls and students."""
    rows = json.loads(results.read_text())
    figure = Figure(figsize=(11, 8.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (size, column, label, higher) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        points = [
            Point(row["kind"], row[size], row[column], row.get(f"{column}_se") or 0.0, LABELS.get(row["run"], ""))
            for row in rows
            if higher or row[column] > 0
        ]
        if not higher:
            axes.set_yscale("log")
        draw_pareto(axes, points, label, AXES[size], higher)
        if not higher:
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
    handles = [Line2D([], [], color=colour, marker="o", linestyle="", label=name) for colour, name in KINDS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(out, dpi=100)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
