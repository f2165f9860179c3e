"""Writes the result of the demo: report.md, two plots, and a summary for the terminal."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from deltanet_hf.evaluation.measures.scores import Score
from deltanet_recipes.demo.measure import Row
from deltanet_recipes.training.logbook import layer_errors, read_log

ERRORS_PLOT, MEMORY_PLOT = "layer_errors.png", "cache_memory.png"


@dataclass(frozen=True)
class Report:
    """The path of the report and the summary to print."""

    path: Path
    summary: str


def write_report(
    folder: Path,
    origin: str,
    converted: Path,
    aligned: Path,
    rows: list[Row],
    prompt: str,
    answers: dict[str, str],
    seconds: dict[str, float],
    peak_bytes: int,
) -> Report:
    """Write report.md and the plots into `folder`.

    Args:
        origin: where the teacher came from.
        rows: the measured models.
        converted: folder of the converted model; aligned: folder of the align run.
        answers: the greedy answer to `prompt` by model.
        seconds: duration of each step of the demo; peak_bytes: peak memory of its processes.
    """
    conversion = json.loads((converted / "conversion.json").read_text())
    before, after = layer_errors(read_log(aligned))
    draw_errors(before, after, folder / ERRORS_PLOT)
    draw_memory(conversion["plan"]["cache_bytes"], folder / MEMORY_PLOT)
    summary = "\n".join(_summary(conversion, before, after, rows, seconds, peak_bytes))
    lines = [
        "# SmolLM2-135M-Instruct with a small part of its KV cache",
        "",
        f"Made by `deltanet-hf demo` on {os.cpu_count()} CPU cores ({platform.machine()}), Python "
        f"{platform.python_version()}, torch {version('torch')}, transformers {version('transformers')}; "
        f"teacher from {origin}. The alignment is kept short; `deltanet-hf recipes` lists complete recipes.",
        "",
        summary,
        "",
        f"![per-layer error]({ERRORS_PLOT})",
        "",
        f"![cache memory]({MEMORY_PLOT})",
        "",
        f"## Greedy answers to: {prompt}",
        "",
    ]
    for name, answer in answers.items():
        lines += [f"**{name}**", "", "```", answer, "```", ""]
    path = folder / "report.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    return Report(path, summary)


def _summary(
    conversion: dict[str, Any],
    before: dict[int, float],
    after: dict[int, float],
    rows: list[Row],
    seconds: dict[str, float],
    peak_bytes: int,
) -> list[str]:
    check = conversion["held_out"]
    lines = [
        f"Held-out perplexity: teacher {check['teacher_perplexity']:.1f}, converted without training "
        f"{check['perplexity']:.1f} (KL {check['kl']:.2f}).",
        f"Relative error of the attention outputs, mean over layers: {_mean(before):.3f} before alignment, "
        f"{_mean(after):.3f} after.",
        f"This run took {sum(seconds.values()) / 60:.1f} minutes "
        f"({', '.join(f'{step}: {time:.0f} s' for step, time in seconds.items())}) "
        f"and at most {peak_bytes / 2**30:.1f} GiB of memory.",
        "",
        "| model | MB of 2,048 / 32,768 tokens | KL to the teacher | perplexity of a passage, 896 tokens later |",
        "|---|---|---|---|",
    ]
    for row in rows:
        repeat = Score(*row.repeat, items=1).exp()
        memory, kl = "{:.1f} / {:.0f}".format(*row.megabytes), "{:.3f} ± {:.3f}".format(*row.kl)
        lines.append(f"| {row.name} | {memory} | {kl} | {repeat.value:.2f} ± {repeat.stderr:.2f} |")
    return lines


def _mean(errors: dict[int, float]) -> float:
    return sum(errors.values()) / len(errors)


def draw_errors(before: dict[int, float], after: dict[int, float], path: Path) -> None:
    """Draw one pair of bars per layer: the error of the attention output before and after alignment."""
    figure, axes = _canvas()
    axes.bar([i - 0.2 for i in before], list(before.values()), 0.4, label="converted", color="#9ecae1")
    axes.bar([i + 0.2 for i in after], list(after.values()), 0.4, label="aligned", color="#3182bd")
    axes.set(xlabel="decoder layer", ylabel="relative MSE, held-out text", title="converted layers against attention")
    axes.legend()
    figure.savefig(path, dpi=120)


def draw_memory(cache: list[dict[str, int]], path: Path) -> None:
    """Draw the cache memory of one sequence over the context length, for teacher and converted model."""
    figure, axes = _canvas()
    contexts = [row["context"] for row in cache]
    axes.loglog(contexts, [row["teacher"] / 2**20 for row in cache], "o-", label="teacher's KV cache", base=2)
    axes.loglog(contexts, [row["converted"] / 2**20 for row in cache], "o-", label="converted", base=2)
    axes.set(xlabel="tokens of context", ylabel="MiB for one sequence", title="Cache memory during generation")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _canvas() -> tuple[Figure, Any]:
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()
