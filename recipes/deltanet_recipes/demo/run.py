"""The steps of the demo and their times.

All steps but the last are commands that a user could type. FOLDER/out holds the teacher, the converted and the aligned
model, and the measurements. The result is FOLDER/report.md and the plots beside it. A step whose output exists already
is not run again.
"""

from __future__ import annotations

import json
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from deltanet_hf.data import shipped_texts
from deltanet_hf.publish import Workspace
from deltanet_recipes.demo.demo_report import write_report
from deltanet_recipes.demo.fetch_teacher import fetch_teacher
from deltanet_recipes.demo.measure import DemoMeasure, softmax_layers

RECIPE = "demo"
# With states, which can be aligned on a CPU in minutes.
CONVERSION = ["--keep", "layers:2,7,8,15,17,18,23", "--mixer", "gated_deltanet+window"]
CALIBRATION_TOKENS = 4096  # two sequences; half of the default, to save time
PROMPT = "What is photosynthesis?"
console = Console()


def run_demo(folder: Path) -> None:
    """Run the steps whose output is missing, then write the report into the folder."""
    out = folder / "out"
    converted, aligned = out / "converted", out / "align"
    clock = Clock()

    clock.begin("1. the teacher")
    teacher, origin = fetch_teacher(out / "teacher")
    console.print(f"SmolLM2-135M-Instruct, from {origin}")

    clock.begin("2. convert")
    if not (converted / "conversion.json").exists():
        resume = ["--resume"] if Workspace(converted).journal.path.exists() else []
        _run("convert", teacher, converted, *CONVERSION, "--calibration-tokens", CALIBRATION_TOKENS, *resume)

    clock.begin("3. align")
    if not (aligned / "final" / "config.json").exists():
        # The last text is measured on; conversion reads no calibration text from the last fifth of all.
        sources = json.dumps([{"path": str(path)} for path in shipped_texts()[:-1]])
        paths = (f"student={converted}", f"teacher={teacher}", f"output={aligned}", f"data.sources={sources}")
        _run("align", RECIPE, *paths)

    models = {"converted, no training": converted, "converted, aligned": aligned / "final"}
    clock.begin("4. generate")
    answers = {}
    for name, model in {"teacher": teacher, **models}.items():
        answers[name] = _run("generate", model, "--prompt", PROMPT, "--max-new-tokens", 24, "--stats", capture=True)
        console.print(f"[bold]{name}[/]: {answers[name]}")

    clock.begin("5. measure")
    measure = DemoMeasure(teacher, models, out / "measured.jsonl", _say)
    students = [measure.student(name) for name in models]
    rows = measure.baselines(softmax_layers(converted), students[0].megabytes[0]) + students

    clock.begin("6. report")
    peak = 1024 * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF))
    report = write_report(folder, origin, converted, aligned, rows, PROMPT, answers, clock.seconds, peak)
    console.print(Markdown(report.summary))
    console.print(f"report: {report.path}")


class Clock:
    """The time of each step.

    Attributes:
        seconds: duration by step, without the step that is under way.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._step: str | None = None
        self._began = time.perf_counter()

    def begin(self, step: str) -> None:
        """Ends the step that is under way, shows its time, and begins the next."""
        now = time.perf_counter()
        if self._step is not None:
            self.seconds[self._step] = now - self._began
            console.print(f"[dim]{self._step}: {now - self._began:.0f} s[/]", highlight=False)
        self._step, self._began = step, now
        console.rule(step)


def _say(line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _run(*arguments: object, capture: bool = False) -> str:
    """Run `deltanet-hf ARGUMENTS` as a process. With `capture`, return its output instead of showing it."""
    command = [sys.executable, "-m", "deltanet_recipes.cli", *map(str, arguments)]
    console.print(
        f"$ deltanet-hf {shlex.join(command[3:])}", style="dim", highlight=False, markup=False, soft_wrap=True
    )
    run = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE if capture else None)
    if run.returncode:
        sys.exit(run.returncode)
    return (run.stdout or "").strip()
