"""Memory and speed against length: `python tools/length_plot.py docs/images/length.png`.

Left: the cache of one sequence of Llama 3.1 8B's shape, by its layout. Right: measured decoding steps by CUDA graph.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM

from deltanet_hf.evaluation.speed.random_models import KINDS, random_config
from deltanet_hf.exit_codes import run_command
from deltanet_hf.models.cache_bits import stored_bytes

SHAPE = "8B"
RESULTS = Path(__file__).parents[1] / "recipes/results/end_to_end_h200.json"
LENGTHS = [1024 * 2**n for n in range(8)]
LAYOUTS = {  # kind of `random_models`: its label, colour and marker
    "teacher": ("original, 16 bits", "black", "s"),
    "teacher4bit": ("original, 4 bits", "tab:gray", "D"),
    "by_layer": ("a tenth of the heads, windows", "tab:orange", "^"),
    "states_by_layer": ("the same with states", "tab:blue", "o"),
    "all": ("Gated DeltaNet in every layer", "tab:green", "v"),
}
STEPS = [(1, 2048), (16, 2048), (1, 32768), (16, 16384)]  # sequences, tokens


def main(out: Annotated[Path, typer.Argument(help="PNG file to write.")]) -> None:
    """Draw MB and milliseconds of original and converted models."""
    figure = Figure(figsize=(8.5, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    memory, speed = figure.subplots(1, 2)
    draw_memory(memory)
    draw_speed(speed)
    figure.legend(*memory.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(out, dpi=140)


def draw_memory(axes: Axes) -> None:
    """MB of one sequence against its tokens."""
    for kind, (label, colour, marker) in LAYOUTS.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(random_config(SHAPE, kind), dtype=torch.bfloat16)
        sizes = [stored_bytes(model, tokens, KINDS[kind].cache_bits) / 1e6 for tokens in LENGTHS]
        axes.plot(LENGTHS, sizes, color=colour, marker=marker, label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="MB per sequence, 8B")
    axes.set_xticks(LENGTHS, [f"{tokens // 1024}k" for tokens in LENGTHS], minor=False)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,g}")


def draw_speed(axes: Axes) -> None:
    """Milliseconds of a step for numbers of sequences and tokens."""
    measured = (
        row for row in json.loads(RESULTS.read_text())["rows"] if (row["shape"], row["mode"]) == (SHAPE, "graph")
    )
    times = {(row["kind"], row["batch"], row["context"]): row["decode_ms"] for row in measured}
    shown = [kind for kind in LAYOUTS if (kind, *STEPS[0]) in times]
    for index, kind in enumerate(shown):
        places = [place + (index - (len(shown) - 1) / 2) * 0.8 / len(shown) for place in range(len(STEPS))]
        axes.bar(places, [times[(kind, *step)] for step in STEPS], 0.8 / len(shown), color=LAYOUTS[kind][1])
    axes.set(ylabel="ms per step, 8B, H200", xlabel="sequences x tokens")
    axes.set_xticks(range(len(STEPS)), [f"{batch} x {tokens // 1024}k" for batch, tokens in STEPS])


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
