"""The report's figures: quality against training tokens, recall, and memory and speed against context length."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Model = dict[str, Any]
_STYLE: dict[str, dict[str, Any]] = {
    "teacher": {"color": "black", "marker": "s"},
    "baseline": {"linestyle": "--", "marker": "x"},
    "student": {"marker": "o"},
}


def write_plots(document: dict[str, Any], out: Path) -> list[Path]:
    """Write the PNGs that the document has data for; returns their paths."""
    models = document["models"]
    written = []
    if any(model["percent_of_teacher"] for model in models[1:]):
        written.append(_save(out / "quality.png", [(models, _quality)]))
    if any(name.startswith("needle_") for name in models[0]["recall"]):
        written.append(_save(out / "recall.png", [(models, _needles), (models, _associative)]))
    if models[0]["speed"]:
        written.append(_save(out / "speed.png", [(models, _memory), (models, _decoding)]))
    return written


def _save(path: Path, panels: list[tuple[list[Model], Any]]) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4 * len(panels) + 2.6, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for index, (models, draw) in enumerate(panels):
        draw(figure.add_subplot(1, len(panels), index + 1), models)
    # Beside the panels: lines run all over them.
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=130)
    return path


def _quality(axes: Axes, models: list[Model]) -> None:
    """Percent of the teacher against training tokens; untrained models at 0."""
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
    """A logarithmic axis that names what was measured."""
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
    axes.set_ylabel("answers right, %")


def _needles(axes: Axes, models: list[Model]) -> None:
    _lines(axes, models, "needle_", "context length, tokens (4 needles)")


def _associative(axes: Axes, models: list[Model]) -> None:
    _lines(axes, models, "mqar_", "key-value pairs (associative recall)")


def _memory(axes: Axes, models: list[Model]) -> None:
    for model in models:
        lengths = [point["length"] for point in model["speed"]]
        megabytes = [point["cache_bytes"] / 1e6 for point in model["speed"]]
        axes.plot(lengths, megabytes, label=model["name"], **_STYLE[model["kind"]])
    _sizes(axes, [point["length"] for point in models[0]["speed"]], "context length, tokens")
    axes.set_yscale("log")
    axes.set_ylabel("cache or state, MB at batch 1")


def _decoding(axes: Axes, models: list[Model]) -> None:
    for model in models:
        lengths = [point["length"] for point in model["speed"]]
        speeds = [point["decode_tokens_per_second"] for point in model["speed"]]
        axes.plot(lengths, speeds, label=model["name"], **_STYLE[model["kind"]])
    _sizes(axes, [point["length"] for point in models[0]["speed"]], "context length, tokens")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("generated tokens a second at batch 1")
