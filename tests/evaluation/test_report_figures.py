"""The report's figures show the numbers of its JSON; its table explains the speeds of the window baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from deltanet_hf.evaluation.report.figures import (
    draw_associative,
    draw_decoding,
    draw_memory,
    draw_needles,
    draw_quality,
    write_figures,
)
from deltanet_hf.evaluation.report.markdown import markdown
from deltanet_hf.evaluation.report.pareto import Point, draw_pareto, frontier


def score(value: float, stderr: float | None = 0.01) -> dict[str, float | None]:
    return {"value": value, "stderr": stderr, "items": 10}


def model(name: str, kind: str, tokens: int, percent: float | None, **changes: Any) -> dict[str, Any]:
    speed = {"prefill_tokens_per_second": 900.0, "decode_tokens_per_second": 50.0, "peak_bytes": None}
    return {
        "name": name,
        "kind": kind,
        "training_tokens": tokens,
        "percent_of_teacher": None if percent is None else score(percent, 1.0),
        "tasks": {},
        "texts": {},
        "bytes": 5_000_000,
        "recall_of_teacher": {"needle_2048": score(0.8)},
        "recall": {"needle_2048": score(0.5), "needle_1024": score(0.75, None), "mqar_8": score(0.25)},
        "speed": [{"length": length, "cache_bytes": 1000 * length, **speed} for length in (1024, 2048)],
        **changes,
    }


SETTINGS = {
    "suite": "small",
    "tasks": {},
    "rows": {},
    "without_data": [],
    "limit": None,
    "device": "CPU",
    "dtype": "auto",
    "torch": "2",
    "transformers": "5",
    "seed": 1,
}
MODELS = [
    model("teacher", "teacher", 0, None),
    model("window 64 + 4 sinks", "baseline", 0, 96.0),
    model("student", "student", 10_000_000, 90.0),
    model("student, linear layers off", "baseline", 0, 3.0),
]


def drawn(draw: Any) -> dict[str, list[tuple[float, float]]]:
    """Label -> points of each labelled line or error bar."""
    axes = Figure().add_subplot()
    draw(axes, MODELS)
    lines = {container.get_label(): container.lines[0] for container in axes.containers}
    lines |= {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
    return {label: list(zip(*map(list, line.get_data()), strict=True)) for label, line in lines.items()}


def test_quality_is_drawn_by_training_tokens() -> None:
    points = drawn(draw_quality)
    assert points == {
        "window 64 + 4 sinks": [(0, 96.0)],
        "student": [(10_000_000, 90.0)],
        "student, linear layers off": [(0, 3.0)],
    }


def test_recall_is_drawn_by_length_and_pairs() -> None:
    assert drawn(draw_needles)["student"] == [(1024, 75.0), (2048, 50.0)]
    assert drawn(draw_associative)["teacher"] == [(8, 25.0)]


def test_memory_and_speed_are_drawn_by_length() -> None:
    assert drawn(draw_memory)["student"] == [(1024, 1.024), (2048, 2.048)]
    assert drawn(draw_decoding)["student"] == [(1024, 50.0), (2048, 50.0)]


def test_only_what_was_measured_is_drawn(tmp_path: Path) -> None:
    names = [path.name for path in write_figures({"models": MODELS}, tmp_path)]
    assert names == ["quality.png", "recall.png", "pareto.png", "speed.png"]
    assert all((tmp_path / name).stat().st_size > 5000 for name in names)
    bare = [{**each, "recall": {}, "speed": [], "percent_of_teacher": None} for each in MODELS]
    assert write_figures({"models": bare}, tmp_path) == []


def test_the_table_shows_errors() -> None:
    text = markdown({"settings": SETTINGS, "models": MODELS})
    assert "| window 64 + 4 sinks | 50.0 ± 1.0 | 75.0 (one item) | 25.0 ± 1.0 |" in text
    assert "| **student** | 5.0 | 80.0 ± 1.0 |" in text


def test_the_frontier_is_what_nothing_smaller_reaches() -> None:
    sizes = [(1, 5.0), (2, 3.0), (2, 4.0), (3, 4.0), (4, 6.0), (5, 2.0)]
    points = [Point("free", megabytes, value) for megabytes, value in sizes]
    assert [(p.megabytes, p.value) for p in frontier(points, higher_is_better=True)] == [(1, 5.0), (4, 6.0)]
    assert [(p.megabytes, p.value) for p in frontier(points, higher_is_better=False)] == [(1, 5.0), (2, 3.0), (5, 2.0)]


def test_students_stand_beside_the_free_frontier() -> None:
    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    free = [Point("teacher", 47.0, 60.0, 2.0, "teacher"), Point("free", 5.0, 5.0, 1.0, "window")]
    students = [Point("student", 5.0, 50.0, 2.0, "one"), Point("student", 5.0, 50.1, 2.0, "two")]
    draw_pareto(axes, [*free, *students], "needles", "MB", higher_is_better=True)
    line = axes.lines[0]
    assert list(zip(*map(list, line.get_data()), strict=True)) == [(5.0, 5.0), (47.0, 60.0)]
    boxes = [text.get_window_extent() for text in axes.texts]
    assert [text.get_text() for text in axes.texts] == ["teacher", "two", "one", "window"]
    assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])
    assert axes.get_xscale() == "log"
