"""Prints the result of a conversion on the terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

MEANINGS = {
    "relative MSE": "relative MSE: 0 is the teacher's attention, 1 as far from it as zeros",
    "copied weights, error": "copied weights, error: that of softmax attention by the layer's q, k, v and o",
}


def print_report(report: dict[str, Any], console: Console) -> None:
    """Prints the checks of every converted layer and of the model; `report`: the contents of `conversion.json`."""
    if report["layers"]:
        console.print(_layers_table(report["layers"]))
    if report["inserted_norms"]:
        console.print(_norms_table(report["inserted_norms"]))
    check = report["held_out"]
    console.print(
        f"Held-out text ({check['tokens']:,} tokens of {report['text']['source']}): perplexity "
        f"{check['teacher_perplexity']:.2f} -> {check['perplexity']:.2f}, KL to the teacher "
        f"{check['kl']:.3f} nats"
    )


def _layers_table(layers: list[dict[str, Any]]) -> Table:
    title = "Converted layers against the teacher's attention, held-out text"
    table = Table(title=title, title_justify="left", caption_justify="left")
    columns = ["layer", "cosine", "relative MSE"]
    if any("softmax_error" in layer for layer in layers):  # only layers that have the teacher's projections
        columns.append("copied weights, error")
    table.caption = "\n".join(MEANINGS[column] for column in columns if column in MEANINGS)
    for column in columns:
        table.add_column(column, justify="right")
    for layer in layers:
        row = [str(layer["index"]), f"{layer['cosine']:.4f}", f"{layer['relative_mse']:.4f}"]
        table.add_row(*row, *([f"{layer['softmax_error']:.1e}"] if "softmax_error" in layer else []))
    means = [sum(layer[key] for layer in layers) / len(layers) for key in ("cosine", "relative_mse")]
    table.add_section()
    table.add_row("mean", f"{means[0]:.4f}", f"{means[1]:.4f}")
    return table


def _norms_table(layers: list[dict[str, Any]]) -> Table:
    table = Table(title="Kept layers with inserted q/k norms: close to the teacher's, not equal", title_justify="left")
    for column in ("layer", "cosine", "relative MSE", "attention KL, nats", "attention logits, relative error"):
        table.add_column(column, justify="right")
    for layer in layers:
        figures = (f"{layer[key]:.4f}" for key in ("cosine", "relative_mse", "attention_kl", "logit_error"))
        table.add_row(str(layer["index"]), *figures)
    return table
