"""Compares runs over the same tokens batch by batch: `python tools/paired.py FOLDER BASE RUN... --out FILE`.

A batch is equally hard for all runs that train on it, so the ratio of the KL of two runs on the same batches is far
less noisy than the difference of their final figures, and a run that was cut off can still be compared up to its last
step. FOLDER/RUN/log.jsonl are the logs of distillations with the same data, order and batch size, as in the output
folder of a study.
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

SHARE = 0.3  # share of the base run at its end, where the rates have decayed and the runs differ steadily


def kl_by_token(log: list[dict[str, Any]]) -> dict[int, float]:
    """The KL of each logged interval of the distil stage, by the tokens that the run had seen in all stages."""
    before = sum({row["stage"]: row["tokens"] for row in log if row["stage"] != "distil"}.values())
    return {before + row["tokens"]: row["kl"] for row in log if row["stage"] == "distil" and "kl" in row}


def compare(log: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean ratio of the KL to that of the base run over the last batches of both, with its standard error.

    Raises UserError if fewer than two logged intervals are in both logs.
    """
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
    """A Markdown table with one line per run."""
    lines = ["| run | error after alignment | KL, relative to the base | tokens |", "|---|---|---|---|"]
    for row in rows:
        error = "-" if row["aligned_error"] is None else f"{row['aligned_error']:.4f}"
        ratio = f"{100 * (row['kl_ratio'] - 1):+.1f}% ± {100 * row['stderr']:.1f}"
        lines.append(f"| {row['run']} | {error} | {ratio} | {row['tokens']:,} |")
    return "\n".join(lines)


def main(
    folder: Annotated[Path, typer.Argument(help="Output folder of a study.")],
    base: Annotated[str, typer.Argument(help="Run with which the others are compared.")],
    runs: Annotated[list[str], typer.Argument(help="Other runs with the same data in the same order.")],
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
) -> None:
    """Compare runs with a base run, print the comparison as a table and write it as JSON."""
    logs = {name: read_log(folder / name) for name in (base, *runs)}
    if missing := [name for name, log in logs.items() if not kl_by_token(log)]:
        raise UserError(f"{folder / missing[0]}: no log of a distil stage there")
    rows = [{"run": name, **compare(log, logs[base])} for name, log in logs.items()]
    out.write_text(json.dumps(rows, indent=1) + "\n")
    typer.echo(markdown(rows))


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
