"""The figures of a report: quality by training tokens, recall, and memory and speed by context length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from deltanet_hf.evaluation.report.pareto import Point, draw_pareto

Model = dict[str, Any]
_STYLE: dict[str, dict[str, Any]] = {
    "teacher": {"color": "black", "marker": "s"},
    "baseline": {"linestyle": "--", "marker": "x"},
    "student": {"marker": "o"},
}


def write_figures(document: dict[str, Any], out: Path) -> list[Path]:
    """Write the PNG files that a report's JSON document has data for into the folder `out`; returns their paths."""
    models = document["models"]
    written = []
    if any(model["percent_of_teacher"] for model in models[1:]):
        written.append(_save(out / "quality.png", [(models, draw_quality)]))
    if any(name.startswith("needle_") for name in models[0]["recall"]):
        written.append(_save(out / "recall.png", [(models, draw_needles), (models, draw_associative)]))
    if len(models) > 1 and (panels := _pareto_panels(models)):
        written.append(_save_pareto(out / "pareto.png", panels))
    if models[0]["speed"]:
        written.append(_save(out / "speed.png", [(models, draw_memory), (models, draw_decoding)]))
    return written


def _save(path: Path, panels: list[tuple[list[Model], Any]]) -> Path:
    figure = Figure(figsize=(5.4 * len(panels) + 2.6, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for index, (models, draw) in enumerate(panels):
        draw(figure.add_subplot(1, len(panels), index + 1), models)
    # The legend is beside the panels, because lines cross all of their area.
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=130)
    return path


def _pareto_panels(models: list[Model]) -> list[tuple[list[Point], str, bool]]:
    """Points, label of the value and whether higher is better: KL on the first text, and the longest needles."""
    panels = []
    for name in list(models[0]["texts"])[:1]:
        panels.append((_points(models, "texts", name, "kl"), f"KL to the teacher on {name}, nats per token", False))
    needle_lengths = [int(n.rpartition("_")[2]) for n in models[0]["recall"] if n.startswith("needle_")]
    if needle_lengths:
        name = f"needle_{max(needle_lengths)}"
        panels.append((_points(models, "recall", name), f"needles found in {max(needle_lengths):,} tokens, %", True))
    return panels


def _points(models: list[Model], group: str, name: str, measure: str | None = None) -> list[Point]:
    """The teacher, students and baselines as points over the megabytes of a sequence of 2,048 tokens."""
    points = []
    for model in models:
        score = model[group][name] if measure is None else model[group][name].get(measure, {"value": 0, "stderr": 0})
        scale = 100 if measure is None else 1
        kind: Any = "free" if model["kind"] == "baseline" else model["kind"]
        value, stderr = scale * score["value"], scale * (score["stderr"] or 0)
        points.append(Point(kind, model["bytes"] / 1e6, value, stderr, model["name"]))
    return points


def _save_pareto(path: Path, panels: list[tuple[list[Point], str, bool]]) -> Path:
    figure = Figure(figsize=(6.0 * len(panels), 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    for index, (points, label, higher) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), index + 1)
        draw_pareto(axes, points, label, "MB per sequence of 2,048 tokens", higher)
    figure.savefig(path, dpi=130)
    return path


def draw_quality(axes: Axes, models: list[Model]) -> None:
    """Percent of the teacher by training tokens; untrained models are at 0."""
    axes.axhline(100, color="black", linewidth=0.8)
    for model in models[1:]:
        score = model["percent_of_teacher"]
        if score is None:
            continue
        marker = "x" if model["kind"] == "baseline" else "o"
        tokens = model["training_tokens"] if model["kind"] == "student" else 0
        axes.errorbar(tokens, score["value"], 2 * score["stderr"], fmt=marker, label=model["name"])
    axes.set_xscale("symlog", linthresh=1e6)
    most = max(model["training_tokens"] for model in models)
    axes.set_xticks([0, *(10**k for k in range(6, len(str(most))))])
    axes.set_xlim(left=-2e5)
    axes.set_xlabel("training tokens")
    axes.set_ylabel("% of teacher, chance-corrected (± 2 standard errors)")


def _sizes(axes: Axes, measured: list[int], label: str) -> None:
    """Make the x axis logarithmic, with a tick per measured size."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(measured, [f"{size:,}" for size in measured])
    axes.set_xlabel(label)


def _lines(axes: Axes, models: list[Model], prefix: str, label: str) -> None:
    for model in models:
        points = sorted((int(n.rpartition("_")[2]), s) for n, s in model["recall"].items() if n.startswith(prefix))
        axes.errorbar(
            [size for size, _ in points],
            [100 * score["value"] for _, score in points],
            [100 * (score["stderr"] or 0) for _, score in points],
            label=model["name"],
            capsize=2,
            **_STYLE[model["kind"]],
        )
    _sizes(axes, sorted({int(n.rpartition("_")[2]) for n in models[0]["recall"] if n.startswith(prefix)}), label)
    axes.set_ylim(-3, 103)
    axes.set_ylabel("correct answers, %")


def draw_needles(axes: Axes, models: list[Model]) -> None:
    """Share of needles found, by context length."""
    _lines(axes, models, "needle_", "context length, tokens (4 needles)")


def draw_associative(axes: Axes, models: list[Model]) -> None:
    """Share of values recalled, by number of pairs."""
    _lines(axes, models, "mqar_", "key-value pairs (associative recall)")


def draw_memory(axes: Axes, models: list[Model]) -> None:
    """Size of the cache, by context length."""
    for model in models:
        lengths = [point["length"] for point in model["speed"]]
        megabytes = [point["cache_bytes"] / 1e6 for point in model["speed"]]
        axes.plot(lengths, megabytes, label=model["name"], **_STYLE[model["kind"]])
    _sizes(axes, [point["length"] for point in models[0]["speed"]], "context length, tokens")
    axes.set_yscale("log")
    axes.set_ylabel("cache or state, MB at batch size 1")


def draw_decoding(axes: Axes, models: list[Model]) -> None:
    """Decoding speed, by context length."""
    for model in models:
        lengths = [point["length"] for point in model["speed"]]
        speeds = [point["decode_tokens_per_second"] for point in model["speed"]]
        axes.plot(lengths, speeds, label=model["name"], **_STYLE[model["kind"]])
    _sizes(axes, [point["length"] for point in models[0]["speed"]], "context length, tokens")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("generated tokens per second at batch size 1")
