"""Runs over the same tokens, batch by batch: `python -m deltanet_recipes.paired FOLDER BASE RUN... --out FILE`.

A batch is as hard for every run that trains on it, so the ratio of two runs' KL on the same batches is far less noisy
than the difference of their final figures, and a run that was cut off can still be compared up to where it came.
FOLDER/RUN/log.jsonl are logs of distillations with the same data, order and batch size (as of a study's output).
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer

from deltanet_hf.errors import UserError
from deltanet_hf.exit_codes import run_command
from deltanet_recipes.training.logbook import read_log

SHARE = 0.3  # the last part of the base run, where rates have decayed and runs differ steadily


def kl_by_token(log: list[dict[str, Any]]) -> dict[int, float]:
    """KL of the training batches of the distil stage, by the tokens that the whole run had seen."""
    before = sum({row["stage"]: row["tokens"] for row in log if row["stage"] != "distil"}.values())
    return {before + row["tokens"]: row["kl"] for row in log if row["stage"] == "distil" and "kl" in row}


def compare(log: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean ratio of the KL to the base run's, with its standard error, over the last batches that both took."""
    own, other = kl_by_token(log), kl_by_token(base)
    begin = max(other) - SHARE * (max(other) - min(other))
    ratios = [own[place] / other[place] for place in sorted(own.keys() & other.keys()) if place > begin]
    if len(ratios) < 2:
        raise UserError(f"no common logged batches of distil after {begin:,.0f} tokens")
    aligned = [row["held_out.error"] for row in log if row["stage"] == "align" and "held_out.error" in row]
    return {
        "tokens": max(own),
        "kl_ratio": statistics.fmean(ratios),
        "stderr": statistics.stdev(ratios) / math.sqrt(len(ratios)),
        "aligned_error": aligned[-1] if aligned else None,
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """One line for each run."""
    lines = ["| run | error after alignment | KL, relative to the base | tokens |", "|---|---|---|---|"]
    for row in rows:
        error = "-" if row["aligned_error"] is None else f"{row['aligned_error']:.4f}"
        ratio = f"{100 * (row['kl_ratio'] - 1):+.1f}% ± {100 * row['stderr']:.1f}"
        lines.append(f"| {row['run']} | {error} | {ratio} | {row['tokens']:,} |")
    return "\n".join(lines)


def main(
    folder: Annotated[Path, typer.Argument(help="Output folder of a study.")],
    base: Annotated[str, typer.Argument(help="The run that the others are held against.")],
    runs: Annotated[list[str], typer.Argument(help="Runs with the same data in the same order.")],
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
) -> None:
    """Compare runs with a base run, print the table, write it as JSON."""
    logs = {name: read_log(folder / name) for name in (base, *runs)}
    if missing := [name for name, log in logs.items() if not kl_by_token(log)]:
        raise UserError(f"{folder / missing[0]}: no log of a distil stage there")
    rows = [{"run": name, **compare(log, logs[base])} for name, log in logs.items()]
    out.write_text(json.dumps(rows, indent=1) + "\n")
    typer.echo(markdown(rows))


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
