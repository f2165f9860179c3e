"""The steps of the demo and their times.

The conversion is a command that a user could type. FOLDER/out holds the teacher and the converted model; where they
exist already, they are used again. The result is FOLDER/report.md and the plot beside it.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from deltanet_hf.publish import Workspace, check_target
from deltanet_hf.safe_write import writing
from deltanet_recipes.demo.demo_report import memory_table, write_report
from deltanet_recipes.demo.fetch_teacher import fetch_teacher
from deltanet_recipes.demo.measure import ASKED, FACT, LENGTH, QUESTION, DemoMeasure

console = Console()


def run_demo(folder: Path) -> None:
    """Run the steps, then write the report into the folder; UserError if it cannot be made."""
    converted = folder / "out" / "converted"
    check_target(converted)
    clock = Clock()

    clock.begin("1. the teacher")
    with writing(folder):
        teacher, origin = fetch_teacher(folder / "out" / "teacher")
    console.print(f"SmolLM2-135M-Instruct, from {origin}")

    clock.begin("2. convert")
    if not (converted / "conversion.json").exists():
        _convert(teacher, converted)

    clock.begin("3. memory of a sequence")
    measure = DemoMeasure(teacher, converted)
    megabytes = {name: measure.megabytes(name) for name in measure.models}
    console.print(Markdown(memory_table(megabytes)))

    clock.begin("4. one fact")
    _say(f'A text of {ASKED:,} tokens says "{FACT.strip()}" and ends with "{QUESTION.strip()}"')
    answers = {}
    for name in measure.models:
        answers[name] = measure.answer(name)
        _say(f"{name}: {answers[name]}")

    clock.begin("5. a long text")
    _say(f"KL to the teacher on {LENGTH:,} tokens, nats per token")
    divergences = {}
    for name, divergences[name] in measure.divergences():
        _say(f"{name}: {divergences[name].mean:.3f}")

    clock.begin("6. report")
    with writing(folder):
        summary = write_report(folder, origin, megabytes, answers, divergences, clock.seconds)
    console.print(Markdown(summary))
    console.print(f"report: {folder / 'report.md'}")


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


def _convert(teacher: Path, out: Path) -> None:
    """Run `deltanet-hf convert TEACHER OUT` as a process, which goes on where an earlier one was interrupted."""
    arguments = ["convert", str(teacher), str(out)]
    if Workspace(out).journal.path.exists():
        arguments.append("--resume")
    _say(f"$ deltanet-hf {shlex.join(arguments)}")
    run = subprocess.run([sys.executable, "-m", "deltanet_recipes.cli", *arguments], check=False)
    if run.returncode:
        sys.exit(run.returncode)
