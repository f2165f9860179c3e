"""Kills a training run with SIGKILL at many points and resumes it; prints the findings as JSON.

    python -m support.kill_training FOLDER POINTS

A child process is killed before or after its n-th call that changes the disk, for POINTS values of n spread over a run
of two stages. This runs as a separate process because it forks.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from deltanet_recipes.config import load_recipe
from deltanet_recipes.training import pipeline
from deltanet_recipes.training.logbook import read_log
from support.fault_runs import STAGES
from support.kill_points import in_child, instrument
from support.tiny_run import make_workplace, recipe_tree, write_recipe


def outcome(out: Path) -> dict[str, Any]:
    """The losses of the run, in order of stages and steps, and the hash of its final weights."""
    losses = sorted((row["stage"], row["step"], row["loss"]) for row in read_log(out) if "loss" in row)
    weights = out / "final" / "model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else None
    return {"losses": losses, "weights": digest}


def main(folder: Path, points: int) -> None:
    torch.set_num_threads(1)
    pipeline.draw_plots = lambda *args: []
    make_workplace(folder)
    out = folder / "run"
    recipe = write_recipe(folder, recipe_tree(folder, STAGES, output=str(out)))

    def train() -> None:
        pipeline.run(load_recipe(recipe), console=Console(file=io.StringIO()))

    def counted() -> None:
        counter = instrument(lambda n: False, after=False)
        train()
        (folder / "calls").write_text(str(counter[0]))

    train()  # imports everything, before any fork
    wanted = outcome(out)
    shutil.rmtree(out)
    assert in_child(counted) == 0
    total = int((folder / "calls").read_text())
    found = []
    for n in sorted({1 + i * (total - 1) // (points - 1) for i in range(points)}):
        shutil.rmtree(out, ignore_errors=True)

        def killed(n: int = n) -> None:
            instrument(lambda call: call == n, after=n % 2 == 0)
            train()

        dead = os.WIFSIGNALED(in_child(killed))
        resumed = os.waitstatus_to_exitcode(in_child(train))
        left = [path.name for path in out.rglob("*") if path.suffix in (".partial", ".tmp", ".damaged")]
        # Tokens are cached under a name of the process that made them.
        left = [name for name in left if name.count(".") < 2]
        found.append(
            {"point": n, "killed": dead, "resumed": resumed, "same": outcome(out) == wanted, "left behind": left}
        )
    print(json.dumps({"calls": total, "points": found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
