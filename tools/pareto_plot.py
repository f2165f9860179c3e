"""Quality and recall by memory: `python tools/pareto_plot.py docs/images/pareto.png`.

Left: KL to the teacher on novels at 4,096 tokens. Then needles and prose facts found in 2,048 tokens. All against the
memory that one sequence of 2,048 tokens takes. The dashed line is the best that costs no training: windows on all
layers of the teacher or on all but the kept ones. The rows are those of `measuring.study.hybrid_row`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.report.pareto import Point, draw_pareto
from deltanet_hf.exit_codes import run_command

RESULTS = Path(__file__).parents[1] / "recipes/results/smollm2-135m-hybrids.json"
PANELS = [  # column, label, whether higher is better
    ("kl_4k", "KL to the teacher at 4,096 tokens, nats", False),
    ("needles_2k", "needles found in 2,048 tokens, %", True),
    ("prose_2k", "prose facts found in 2,048 tokens, %", True),
]


def points(rows: list[dict[str, Any]], labels: dict[str, str], column: str) -> list[Point]:
    """The points of the runs in `labels`, and of the free policies beside them."""
    found: dict[tuple[float, float], Point] = {}
    for row in rows:
        if row["run"] not in labels or column not in row:
            continue
        kind: Any = "teacher" if set(row["kinds"]) == {"softmax"} else "student"
        found[row["mb_2k"], row[column]] = _point(kind, row, column, labels[row["run"]])
        for policy in (row.get("free"), row.get("free_window")):
            if policy is not None:
                kept = f"{len(policy['kept'])} layers, " if policy["kept"] else ""
                kept = "single heads, " if policy.get("kept_heads") else kept
                label = f"{kept}window {policy['window']}"
                twins = [point for point in found.values() if point.kind == "free" and _alike(point, policy, column)]
                if not twins:
                    found[policy["mb_2k"], policy[column]] = _point("free", policy, column, label)
    return list(found.values())


def _alike(point: Point, policy: dict[str, Any], column: str) -> bool:
    """Whether a policy would cover a point: equal bytes and value within 1% and .5 (KL: .002)."""
    near = 0.002 if column.startswith("kl_") else 0.5
    return abs(point.megabytes / policy["mb_2k"] - 1) < 0.01 and abs(point.value - policy[column]) < near


def _point(kind: Any, row: dict[str, Any], column: str, label: str) -> Point:
    return Point(kind, row["mb_2k"], row[column], row.get(f"{column}_se") or 0.0, label)


def main(
    out: Annotated[Path, typer.Argument(help="PNG file to write.")],
    run: Annotated[
        list[str] | None,
        typer.Option(help="RUN or RUN=LABEL to draw; repeatable. Default: all rows without an error."),
    ] = None,
    results: Annotated[Path, typer.Option(help="Results file.")] = RESULTS,
) -> None:
    """Draw quality and recall against memory."""
    rows = [row for row in json.loads(results.read_text()) if "error" not in row]
    names = [row["run"] for row in rows]
    labels = dict((entry.split("=", 1) * 2)[:2] for entry in run or names)
    if missing := [name for name in labels if name not in names]:
        raise UserError(f"--run {missing[0]}: no such row in {results}: {', '.join(names)}")
    figure = Figure(figsize=(4.6 * len(PANELS), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (column, label, higher) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        if not higher:
            axes.set_yscale("log")
        draw_pareto(axes, points(rows, labels, column), label, "MB per sequence of 2,048 tokens", higher)
        if not higher:
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
