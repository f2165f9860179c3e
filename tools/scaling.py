"""Runs one recipe on several numbers of GPUs: `python tools/scaling.py RECIPE OUT [key=value ...] --gpus 1,2,4`.

Every run is one `accelerate launch` over the same tokens in the same order. The table shows the speed of each run and
how far its losses are from those of the first.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from deltanet_hf.errors import UserError
from deltanet_hf.exit_codes import run_command
from deltanet_recipes.training.logbook import read_log


def launch(recipe: Path, folder: Path, overrides: list[str], processes: int, sharding: str) -> list[dict[str, Any]]:
    """Run the recipe and return its log. Raises UserError with the last line of output if the run fails."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes), "--num_machines", "1",
        "--mixed_precision", "no", "--dynamo_backend", "no", *(["--multi_gpu"] if processes > 1 else []),
        "-m", "deltanet_recipes.distill", str(recipe), *overrides, f"output={folder / 'run'}",
        f"engine.sharding={sharding}",
    ]  # fmt: skip
    with open(folder / "output.log", "wb") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    if code:
        last = (folder / "output.log").read_text(errors="replace").strip().splitlines()[-1:]
        raise UserError(
            f"{processes} processes, {sharding}: exit code {code}: {''.join(last)}; see {folder}/output.log"
        )
    return [row for row in read_log(folder / "run") if "loss" in row]


def summarise(log: list[dict[str, Any]], first: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Speed over the second half of the steps, and the largest relative difference of a logged loss from `first`."""
    losses = [row["loss"] for row in log]
    against = [row["loss"] for row in first] if first else losses
    if len(against) != len(losses):
        raise UserError("the runs logged different numbers of losses; log.every must divide their steps alike")
    return {
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in log[len(log) // 2 :]),
        "memory_gib": max(row["memory_gib"] for row in log),
        "last_loss": losses[-1],
        "worst_difference": max(abs(a - b) / abs(b) for a, b in zip(losses, against, strict=True)),
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """A Markdown table with one line per run."""
    lines = ["| GPUs | sharding | tokens/s | speed-up | memory, GiB | last loss | largest difference of a loss |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [str(row["processes"]), row["sharding"]]
        if "error" in row:
            lines.append("| " + " | ".join([*cells, "failed: " + row["error"], "", "", "", ""]) + " |")
            continue
        cells += [f"{row['tokens_per_second']:,.0f}", f"{row['speedup']:.2f}", f"{row['memory_gib']:.1f}"]
        cells += [f"{row['last_loss']:.4f}", f"{100 * row['worst_difference']:.2f}%"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(
    recipe: Annotated[Path, typer.Argument(help="Recipe; a few hundred steps are enough.")],
    out: Annotated[Path, typer.Argument(help="Folder for the runs and for scaling.json.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, as for `deltanet-hf distill`.")] = None,
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs. The runs are compared with the first.")] = "1,2,4",
    sharding: Annotated[str, typer.Option(help="Values of engine.sharding for runs on several GPUs.")] = "none,fsdp2",
) -> None:
    """Run a recipe on several numbers of GPUs, print the table and write scaling.json."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    rows: list[dict[str, Any]] = []
    first: list[dict[str, Any]] | None = None
    for processes in map(int, gpus.split(",")):
        for kind in sharding.split(",") if processes > 1 else ["none"]:
            row: dict[str, Any] = {"processes": processes, "sharding": kind}
            try:
                log = launch(recipe, out / f"{processes}-{kind}", overrides or [], processes, kind)
                row |= summarise(log, first)
                first = first or log
                row["speedup"] = row["tokens_per_second"] / rows[0]["tokens_per_second"] if rows else 1.0
            except UserError as error:
                row["error"] = str(error)
                if first is None:
                    raise
            rows.append(row)
            text = json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=1)
            (out / "scaling.json").write_text(text + "\n")
    typer.echo(markdown(rows))


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
