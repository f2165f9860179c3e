"""Quality and recall over MB per sequence: points, and the frontier of the models that cost no training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

_STYLE: dict[str, dict[str, Any]] = {
    "teacher": {"marker": "s", "color": "black"},
    "free": {"marker": "x", "color": "tab:gray"},
    "control": {"marker": "^", "color": "tab:orange"},
    "student": {"marker": "o", "color": "tab:blue"},
}
_CLOSE, _APART = 6, 11  # points between a marker and its label; tried in this order
_PLACES = [
    (dx * gap, dy * gap, ha, va)
    for gap in (_CLOSE, _APART, 2 * _APART, 3 * _APART)
    for dx, dy, ha, va in (
        (1, 0, "left", "center"),
        (-1, 0, "right", "center"),
        (0.4, 1, "left", "bottom"),
        (0.4, -1, "left", "top"),
        (-0.4, 1, "right", "bottom"),
        (-0.4, -1, "right", "top"),
    )
]


@dataclass(frozen=True)
class Point:
    """A model in the plot.

    Attributes:
        megabytes: memory of one sequence.
        stderr: standard error of `value`; 0 if unknown.
        label: text beside the point; empty for none.
    """

    kind: Literal["teacher", "free", "control", "student"]
    megabytes: float
    value: float
    stderr: float = 0.0
    label: str = ""


def frontier(points: Sequence[Point], higher_is_better: bool) -> list[Point]:
    """The points that no point with as few or fewer bytes reaches, by bytes."""
    sign = 1 if higher_is_better else -1
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.megabytes, -sign * point.value)):
        if not best or sign * point.value > sign * best[-1].value:
            best.append(point)
    return best


def draw_pareto(axes: Axes, points: Sequence[Point], ylabel: str, xlabel: str, higher_is_better: bool) -> None:
    """Draw points over a logarithmic axis of MB, and the frontier of the untrained models and the teacher as a line.

    The labels are placed where they cover no point and no other label.
    """
    free = [point for point in points if point.kind in ("teacher", "free")]
    line = frontier(free, higher_is_better)
    axes.plot([p.megabytes for p in line], [p.value for p in line], color="tab:gray", linestyle="--", zorder=1)
    for point in points:
        style = _STYLE[point.kind]
        axes.errorbar(point.megabytes, point.value, point.stderr, capsize=2, markersize=5, zorder=2, **style)
    axes.set_xscale("log")
    sizes = [point.megabytes for point in points]
    axes.set_xlim(min(sizes) / 2.2, max(sizes) * 2.6)
    low, high = axes.get_xlim()
    ticks = [step * 10.0**power for power in range(-3, 6) for step in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.margins(y=0.1)
    axes.grid(alpha=0.25)
    _label(axes, points, line)


def _label(axes: Axes, points: Sequence[Point], line: Sequence[Point]) -> None:
    """Write the labels, each at the first place around its point that is free of markers, labels and the line."""
    figure = axes.figure
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    scale = figure.dpi / 72
    marks = [axes.transData.transform((point.megabytes, point.value)) for point in points]
    corners = [axes.transData.transform((point.megabytes, point.value)) for point in line]
    obstacles = [*marks, *(a + (b - a) * step / 24 for a, b in pairwise(corners) for step in range(25))]
    taken: list[Bbox] = []
    area = axes.get_window_extent(renderer)
    for point in sorted(points, key=lambda point: (point.kind == "free", -point.value)):
        if not point.label:
            continue
        found: Annotation | None = None
        for dx, dy, ha, va in _PLACES:
            if found is not None:
                found.remove()
            found = axes.annotate(
                point.label,
                (point.megabytes, point.value),
                (dx, dy),
                textcoords="offset points",
                ha=ha,
                va=va,
                fontsize=7.5,
                color=_STYLE[point.kind]["color"],
            )
            box = found.get_window_extent(renderer)
            inside = area.x0 <= box.x0 and box.x1 <= area.x1 and area.y0 <= box.y0 and box.y1 <= area.y1
            covers = any(box.padded(2 * scale).contains(*other) for other in obstacles)
            if inside and not covers and not any(box.overlaps(other) for other in taken):
                break
        assert found is not None
        taken.append(found.get_window_extent(renderer))
