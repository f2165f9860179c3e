"""tools/scaling.py runs one recipe on several numbers of processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltanet_hf.errors import UserError
from scaling import markdown, summarise
from support.tiny_run import DISTIL, make_workplace, recipe_tree, write_recipe

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_one_and_two_processes_are_compared(tmp_path: Path) -> None:
    make_workplace(tmp_path)
    recipe = write_recipe(tmp_path, recipe_tree(tmp_path, [{**DISTIL, "tokens": 128 * 4}]))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tools" / "scaling.py"), str(recipe), str(tmp_path / "out")]
    options = ["--gpus", "1,2", "--sharding", "none"]
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    one, two = json.loads((tmp_path / "out" / "scaling.json").read_text())["rows"]
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["worst_difference"] < 1e-3
    assert two["last_loss"] > 0
    assert "| 2 | none |" in done.stdout


def test_a_run_that_fails_is_a_row_and_different_lengths_are_refused() -> None:
    row = {"tokens_per_second": 10.0, "memory_gib": 1.0, "loss": 2.0}
    good = {"processes": 1, "sharding": "none", "speedup": 1.0, **summarise([row, {**row, "loss": 1.0}], None)}
    assert good["last_loss"] == 1.0
    assert good["worst_difference"] == 0.0
    table = markdown([good, {"processes": 2, "sharding": "fsdp2", "error": "no such GPU"}])
    assert table.splitlines()[-1].count("|") == table.splitlines()[-2].count("|") == 8
    with pytest.raises(UserError, match=r"log\.every"):
        summarise([row], [row, row])
