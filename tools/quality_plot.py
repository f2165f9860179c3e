"""The picture of README.md: `python tools/quality_plot.py docs/images/quality.png`.

Left: KL to the teacher (recipes/results) against the memory that one sequence of 32,768 tokens takes. Right: that memory
against the context length. The bytes are those that the layers of SmolLM2-135M report of themselves, in bfloat16.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from transformers import LlamaConfig

from deltanet_hf import LayerTable, converted_config
from deltanet_hf.models.factory import model_class

RESULTS = Path(__file__).parents[1] / "recipes/results/smollm2-135m-study.json"
LAYERS, CONTEXT = 30, 32768
SMOLLM2 = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=LAYERS,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
)
KEPT = tuple(range(3, LAYERS, 4))
TABLES = {
    "teacher": None,
    "7 of 30 layers softmax": LayerTable.preset(LAYERS, softmax=KEPT),
    "Gated DeltaNet": LayerTable.preset(LAYERS),
    "window 64 + 4": LayerTable.preset(LAYERS, "window"),
}
POINTS = [  # run of the results file, what it is, label, whether it was trained
    ("teacher", "teacher", "teacher", False),
    ("softmax7-100m-seed1", "7 of 30 layers softmax", "7 of 30 layers\nsoftmax, 100M", True),
    ("gdn-100m-seed1", "Gated DeltaNet", "Gated DeltaNet, 100M", True),
    ("best-10m-seed0", "Gated DeltaNet", "Gated DeltaNet, 9.9M", True),
    ("window-distilled-100m", "window 64 + 4", "window, 100M", True),
    ("window-distilled-10m", "window 64 + 4", "window, 9.9M", True),
    ("window-untrained", "window 64 + 4", "window, no training", False),
]
COLORS = dict(zip(TABLES, ("black", "tab:green", "tab:blue", "tab:orange"), strict=True))


def cache_bytes(table: LayerTable | None, tokens: int) -> int:
    """Bytes that one sequence of `tokens` tokens takes in the cache; None for the teacher."""
    head_dim = SMOLLM2.hidden_size // SMOLLM2.num_attention_heads
    softmax = 2 * SMOLLM2.num_key_value_heads * head_dim * torch.bfloat16.itemsize * tokens
    if table is None:
        return LAYERS * softmax
    with torch.device("meta"):
        model = model_class("llama")(converted_config(SMOLLM2, table))
    states = (model.model.layers[index].self_attn.state_bytes(torch.bfloat16) for index in table.converted)
    return sum(states) + len(table.softmax) * softmax


def main(out: Annotated[Path, typer.Argument(help="PNG file to write.")]) -> None:
    """Draw the picture of the README."""
    rows = {row["run"]: row["metrics"] for row in json.loads(RESULTS.read_text())}
    figure = Figure(figsize=(9.2, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for run, table, label, trained in POINTS:
        megabytes, kl = cache_bytes(TABLES[table], CONTEXT) / 1e6, rows[run]["heldwiki.kl"]
        left.errorbar(
            megabytes, kl["value"], kl["stderr"], fmt="o" if trained else "s", color=COLORS[table], capsize=2, ms=5
        )
        side = -1 if megabytes > 100 else 1
        left.annotate(
            label,
            (megabytes, kl["value"]),
            (7 * side, 0),
            textcoords="offset points",
            ha="left" if side > 0 else "right",
            va="center",
            fontsize=8,
        )
    left.set(xscale="log", xlim=(1, 1200), ylim=(-0.012, 0.27), ylabel="KL to the teacher, nats per token")
    left.set(xlabel=f"MB per sequence of {CONTEXT:,} tokens")
    contexts = [2**power for power in range(7, 18)]
    for name, table in TABLES.items():
        right.plot(contexts, [cache_bytes(table, n) / 1e6 for n in contexts], color=COLORS[name], label=name)
    right.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="MB per sequence")
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.25)
    figure.savefig(out, dpi=100)


if __name__ == "__main__":
    typer.run(main)
