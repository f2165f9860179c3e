"""`python -m deltanet_recipes.demo FOLDER` runs the demo; every step is a command that a user could type.

FOLDER/out holds the teacher, the converted and the aligned model, and the scores. The result is FOLDER/report.md and
the plots beside it. A step whose output exists already is not run again.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from deltanet_hf.exit_codes import run_command
from deltanet_hf.publish import Workspace
from deltanet_recipes.demo.demo_report import Score, write_report
from deltanet_recipes.demo.fetch_teacher import fetch_teacher

RECIPE = "demo"
CALIBRATION_TOKENS = 2048
TASKS = ("demo_cloze", "demo_repeat")
PROMPT = "What is the capital of France?"
console = Console()


def main() -> None:
    """Run the steps whose output is missing, then write the report."""
    folder = Path(sys.argv[1])
    out = folder / "out"
    converted, aligned = out / "converted", out / "align"
    began = time.perf_counter()

    console.rule("1. the teacher")
    teacher, origin = fetch_teacher(out / "teacher")
    console.print(f"SmolLM2-135M-Instruct, from {origin}")

    console.rule("2. convert")
    if not (converted / "conversion.json").exists():
        resume = ["--resume"] if Workspace(converted).journal.exists() else []
        # The demo aligns for a minute and does not distil, so the wiring for an untrained model is the better one.
        _run("convert", teacher, converted, "--no-training", "--calibration-tokens", CALIBRATION_TOKENS, *resume)

    console.rule("3. align")
    if not (aligned / "final" / "config.json").exists():
        _run("align", RECIPE, f"student={converted}", f"teacher={teacher}", f"output={aligned}")

    console.rule("4. evaluate")
    scores = [
        _score("teacher", teacher, out),
        _score("teacher, window 64 + 4 sinks", teacher, out, "--window", 64),
        _score("converted, no training", converted, out),
        _score("converted, aligned", aligned / "final", out),
    ]

    console.rule("5. generate")
    answers = {}
    for name, model in (("teacher", teacher), ("converted, aligned", aligned / "final")):
        answers[name] = _run("generate", model, "--prompt", PROMPT, "--max-new-tokens", 24, "--stats", capture=True)
        console.print(f"[bold]{name}[/]: {answers[name]}")

    console.rule("6. report")
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    report = write_report(folder, origin, converted, aligned, scores, PROMPT, answers, seconds, peak)
    console.print(report.summary)
    console.print(f"report: {report.path}")


def _run(*arguments: object, capture: bool = False) -> str:
    """Run `deltanet-hf ARGUMENTS` as a process. With `capture`, return its output instead of showing it."""
    command = [sys.executable, "-m", "deltanet_recipes.cli", *map(str, arguments)]
    console.print(f"[dim]$ deltanet-hf {' '.join(command[3:])}[/]", highlight=False, soft_wrap=True)
    run = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE if capture else None)
    if run.returncode:
        sys.exit(run.returncode)
    return (run.stdout or "").strip()


def _score(name: str, model: Path, out: Path, *options: object) -> Score:
    """The lm-eval accuracies of `model` on the tasks of the demo, read from an earlier run if there is one."""
    folder = out / "eval" / name.replace(" ", "_").replace(",", "")
    if not list(folder.rglob("results_*.json")):
        _run("eval", model, "--tasks", ",".join(TASKS), "--output_path", folder, "--device", "cpu", *options)
    results = json.loads(max(folder.rglob("results_*.json")).read_text())["results"]
    return Score(name, {task: (results[task]["acc,none"], results[task]["acc_stderr,none"]) for task in TASKS})


if __name__ == "__main__":
    run_command(main)
