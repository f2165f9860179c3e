"""Retrieval and loss against the length of a text: `python tools/context_plot.py docs/images/context.png`.

Left: needles of all kinds together, with binomial standard errors. Right: nats of the same tokens at the end of texts
of each length. The legend gives the cache of 32,768 tokens. The rows are those of `measuring.study.context`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from context_table import LENGTHS, context_rows
from deltanet_hf.exit_codes import run_command
from measuring.rows import Row
from measuring.study.far_needles import KINDS

RESULTS = Path(__file__).parents[1] / "recipes/results/smollm2-135m-context.json"
MODELS = {  # label, colour, marker and line
    "teacher": ("teacher", "black", "s", "-"),
    "teacher, YaRN": ("teacher, YaRN", "tab:gray", "D", "--"),
    "teacher, YaRN, trained": ("teacher, YaRN, trained", "tab:gray", "D", "-"),
    "converted, yarn": ("converted, before training", "tab:orange", "^", "--"),
    "trained, yarn": ("converted, trained", "tab:orange", "^", "-"),
}
NATS = (3.15, 3.55)  # those of the teacher beyond its positions are written, not drawn


def main(out: Annotated[Path, typer.Argument(help="PNG file to write.")]) -> None:
    """Draw needles found and nats of a teacher and its conversions at three lengths."""
    rows, probes = context_rows(RESULTS), json.loads(RESULTS.read_text())["probes"]
    figure = Figure(figsize=(8.5, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    needles, nats = figure.subplots(1, 2)
    for index, (model, (label, colour, marker, line)) in enumerate(MODELS.items()):
        label = f"{label}: {rows[model]['MB_32k']:.0f} MB"
        style = {"color": colour, "marker": marker, "linestyle": line, "label": label}
        found = [_found(rows[model], length, probes) for length in LENGTHS]
        places = [place + (index - (len(MODELS) - 1) / 2) * 0.05 for place in range(len(LENGTHS))]
        needles.errorbar(places, [share for share, _ in found], [error for _, error in found], capsize=2, **style)
        nats.plot(range(len(LENGTHS)), [rows[model][f"nats_{length}"] for length in LENGTHS], **style)
    needles.set(ylabel="needles found, %", xlabel="tokens", ylim=(-2, None))
    nats.set(ylabel="nats per token", xlabel="tokens", ylim=NATS)
    beyond = [f"{rows['teacher'][f'nats_{length}']:.1f} at {length}" for length in LENGTHS[1:]]
    nats.annotate(f"teacher: {', '.join(beyond)}", (0.13, 0.93), xycoords="axes fraction")
    for axes in (needles, nats):
        axes.set_xticks(range(len(LENGTHS)), LENGTHS)
    handles, labels = nats.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(out, dpi=140)


def _found(row: Row, length: str, probes: int) -> tuple[float, float]:
    """The mean share of needles over the kinds and its standard error, in percent; `probes` are those of a kind."""
    shares = [row[f"{kind}_{length}"] for kind in KINDS]
    variance = sum(share * (1 - share) / probes for share in shares)
    return 100 * sum(shares) / len(shares), 100 * math.sqrt(variance) / len(shares)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
