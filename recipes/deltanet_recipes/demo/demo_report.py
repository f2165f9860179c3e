"""Writes the result of the demo: report.md, a plot, and a summary for the terminal."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from deltanet_hf.evaluation.measures.relative import Clusters, paired_difference
from deltanet_recipes.demo.measure import (
    BLOCK,
    CONTEXTS,
    CONVERTED,
    EQUAL_AT,
    LENGTH,
    QUESTION,
    SHORT,
    SHORTENED,
    STATELESS,
)

PLOT = "demo.png"


def write_report(
    folder: Path,
    origin: str,
    megabytes: dict[str, list[float]],
    answers: dict[str, str],
    divergences: dict[str, Clusters],
    seconds: dict[str, float],
) -> str:
    """Write report.md and the plot into `folder`; returns the summary to print.

    Args:
        origin: where the teacher came from.
        megabytes: by model, of a sequence of each of `CONTEXTS`.
        answers: by model, what follows `QUESTION`.
        divergences: by model, KL to the teacher in nats per token, per block.
        seconds: duration of each step.
    """
    draw(megabytes, divergences, folder / PLOT)
    summary = "\n".join(_summary(megabytes, answers, divergences))
    lines = [
        "# SmolLM2-135M-Instruct, converted",
        "",
        f"Made by `deltanet-hf demo` on {os.cpu_count()} CPU cores ({platform.machine()}), Python "
        f"{platform.python_version()}, torch {version('torch')}, transformers {version('transformers')}; teacher from "
        f"{origin}. It took {sum(seconds.values()) / 60:.1f} minutes "
        f"({', '.join(f'{step}: {time:.0f} s' for step, time in seconds.items())}).",
        "",
        summary,
        "",
        f"![memory by length, KL by place in the text]({PLOT})",
        "",
    ]
    (folder / "report.md").write_text("\n".join(lines), encoding="utf-8")
    return summary


def memory_table(megabytes: dict[str, list[float]]) -> str:
    """MB of the cache of one sequence by its tokens, as Markdown."""
    lines = [f"| tokens | {' | '.join(f'{tokens:,}' for tokens in CONTEXTS)} |", "|---" * (len(CONTEXTS) + 1) + "|"]
    lines += [f"| {name}, MB | {' | '.join(f'{mb:.1f}' for mb in row)} |" for name, row in megabytes.items()]
    return "\n".join(lines)


def _summary(megabytes: dict[str, list[float]], answers: dict[str, str], divergences: dict[str, Clusters]) -> list[str]:
    near, far = CONTEXTS.index(EQUAL_AT), CONTEXTS[-1]
    kl = {name: f"{part.score.value:.3f} ± {part.score.stderr:.3f}" for name, part in divergences.items()}
    lines = [
        f"| without training | MB of {EQUAL_AT:,} / {far:,} tokens |{QUESTION} ... | KL to the teacher, nats |",
        "|---|---|---|---|",
    ]
    for name, row in megabytes.items():
        lines.append(f"| {name} | {row[near]:.1f} / {row[-1]:.0f} | {answers[name]} | {kl.get(name, '0')} |")
    more = paired_difference(divergences[STATELESS], divergences[SHORTENED])
    return [
        *lines,
        f"| {STATELESS} | the same | - | {kl[STATELESS]} |",
        "",
        f"`{CONVERTED}` is what `deltanet-hf convert` makes: windows and states, and full attention in a few heads. "
        "The windows of the second row, in all heads of the teacher, take as many bytes. In the last two rows, the "
        f"windows of the converted model are cut to {SHORT} tokens. What has left them is read from the states: "
        f"switched off, they leave a KL that is {more.value:.3f} ± {more.stderr:.3f} higher on the same {LENGTH:,} "
        "tokens. One fact is an example: without training, a converted model misses some that its teacher finds.",
    ]


def draw(megabytes: dict[str, list[float]], divergences: dict[str, Clusters], path: Path) -> None:
    """Draw the memory of one sequence over its length, and the KL over the place in the text."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    memory, divergence = figure.subplots(1, 2)
    for name, row in megabytes.items():
        memory.plot(CONTEXTS, row, "o-", label=name)
    memory.set(xscale="log", yscale="log", xlabel="tokens", ylabel="MB", title="Cache of one sequence")
    memory.set_xticks(CONTEXTS, [f"{tokens // 1024}k" for tokens in CONTEXTS])
    memory.set_xticks([], minor=True)
    memory.set_yticks(ticks := [5, 10, 30, 100, 300, 1000], [str(tick) for tick in ticks])
    memory.set_yticks([], minor=True)
    for index, (name, part) in enumerate(divergences.items(), 1):  # in the colours of the memory
        ends = [BLOCK * (block + 1) for block in range(len(part.sums))]
        divergence.plot(ends, part.sums / part.sizes, "o-", color=f"C{index}", label=name)
    divergence.set(xlabel="tokens read", ylabel="nats per token", title="KL to the teacher on running text")
    divergence.set_ylim(0, 1.4 * divergence.get_ylim()[1])  # room for the legend
    for axes in (memory, divergence):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
