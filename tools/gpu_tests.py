"""Runs the tests that use a GPU and records how they ended: `python tools/gpu_tests.py --commit COMMIT`.

The record of the last run is tests/gpu_run.json, which docs/contributing.md shows (readme_tables.py).
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any
from xml.etree import ElementTree

import torch
import transformers
import triton
import typer

from deltanet_hf.errors import UserError
from deltanet_hf.exit_codes import run_command
from measuring.markdown import Column, table

RECORD = Path(__file__).parents[1] / "tests/gpu_run.json"
SUITES = (["tests/kernels", "tests/plugin"], ["-m", "gpu", "tests/convert", "tests/recipes"])


def counted(arguments: list[str]) -> dict[str, int]:
    """Run pytest and count how its tests ended: `passed`, `failed` (errors too) and `skipped`.

    Raises UserError if pytest ends without having run.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.xml"
        subprocess.run([sys.executable, "-m", "pytest", f"--junitxml={path}", *arguments], check=False)
        if not path.is_file():
            raise UserError(f"pytest {' '.join(arguments)}: ended without results; nothing is recorded")
        suites = ElementTree.parse(path).getroot().iter("testsuite")
        totals = {key: 0 for key in ("tests", "failures", "errors", "skipped")}
        for suite in suites:
            totals = {key: count + int(suite.attrib[key]) for key, count in totals.items()}
    failed = totals["failures"] + totals["errors"]
    return {"passed": totals["tests"] - failed - totals["skipped"], "failed": failed, "skipped": totals["skipped"]}


def machine() -> dict[str, Any]:
    """The GPU and the versions that a run depends on."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
    }


def gpu(path: Path) -> str:
    """The record as a table, for readme_tables.py."""
    if not path.is_file():
        return "No run is recorded; `make test-gpu` writes the record."
    keys = ("commit", "date", "gpu", "torch", "triton", "transformers", "passed", "failed", "skipped", "minutes")
    return table([Column(key, _cell, (key,)) for key in keys], [json.loads(path.read_text())])


def _cell(run: dict[str, Any], key: str) -> str:
    value = run[key]
    return f"{value:,}" if isinstance(value, int) else str(value)


def record(suites: list[list[str]], commit: str, out: Path) -> int:
    """Run pytest once per list of arguments and write the record; returns the number of tests that failed."""
    began = time.monotonic()
    ended = [counted(arguments) for arguments in suites]
    totals = {key: sum(run[key] for run in ended) for key in ended[0]}
    date = datetime.now(timezone.utc).date().isoformat()
    minutes = round((time.monotonic() - began) / 60)
    run = {"commit": commit, "date": date, **machine(), **totals, "minutes": minutes}
    out.write_text(json.dumps(run, indent=1) + "\n")
    return totals["failed"]


def main(commit: Annotated[str, typer.Option(help="The commit that is tested.")]) -> None:
    """Run the tests that use a GPU and record how they ended."""
    if not torch.cuda.is_available():
        raise UserError("no CUDA device")
    raise typer.Exit(1 if record([list(suite) for suite in SUITES], commit, RECORD) else 0)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
