"""Scores models on the report's small suite of lm-eval tasks and adds the result to their rows of a study.

Command: `python -m measuring.study.suite RESULTS.json --teacher TEACHER --data DATA --model NAME=FOLDER ...`.

A row gets `suite`, the mean share of the teacher's scores above chance in per cent, its standard error `suite_se` (the
items are the same for both models), and `suite_tasks`, the scores per task in per cent.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoTokenizer

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.report.teacher_share import percent_of_teacher
from deltanet_hf.evaluation.tasks.harness import Harness, TaskResult
from deltanet_hf.evaluation.tasks.lm_eval_model import DeltaNetLM
from deltanet_hf.evaluation.tasks.suites import SUITES
from deltanet_hf.exit_codes import run_command
from measuring.rows import RowFile
from measuring.study.results_row import load_for_measure


def suite_columns(
    student: dict[str, TaskResult], teacher: dict[str, TaskResult], harness: Harness
) -> dict[str, float | dict[str, float] | None]:
    """The keys of a row: `suite`, `suite_se` and `suite_tasks`."""
    share = percent_of_teacher(student, teacher, harness.tasks)
    return {
        "suite": None if share is None else round(share.value, 3),
        "suite_se": None if share is None else round(share.stderr, 3),
        "suite_tasks": {task.name: round(100 * float(student[task.name].samples.mean()), 3) for task in harness.tasks},
    }


def main(
    results: Annotated[Path, typer.Argument(help="JSON file with the rows of the models.")],
    teacher: Annotated[str, typer.Option(help="Folder of the teacher.")],
    data: Annotated[Path, typer.Option(help="Folder of NAME/SPLIT.jsonl.gz files.")],
    model: Annotated[list[str], typer.Option(help="NAME=FOLDER of a model to measure; repeatable.")],
    limit: Annotated[int | None, typer.Option(min=2, help="Use at most this many rows of each task.")] = None,
) -> None:
    """Score models on the small suite, and add the share of the teacher's scores to their rows in RESULTS."""
    order = [row["run"] for row in RowFile(results).rows()]
    file = RowFile(results, arranged=lambda rows: sorted(rows, key=lambda row: order.index(row["run"])))
    rows = {row["run"]: row for row in file.rows()}
    folders = {name: folder for name, _, folder in (entry.partition("=") for entry in model)}
    if unknown := sorted(name for name in folders if name not in rows):
        raise UserError(f"--model {unknown[0]}={folders[unknown[0]]}: {results} has no row of this name")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    harness = Harness(SUITES["small"].tasks, data, limit)

    def scores(folder: str) -> dict[str, TaskResult]:
        loaded: Any = load_for_measure(folder, device)
        return harness.run(DeltaNetLM(loaded, tokenizer=tokenizer, batch_size="auto"))

    reference = scores(teacher)
    for name, folder in folders.items():
        began = time.perf_counter()
        columns = suite_columns(scores(folder), reference, harness)
        file.add({**rows[name], **columns})
        typer.echo(f"{name}: suite {columns['suite']} +- {columns['suite_se']} ({time.perf_counter() - began:.0f} s)")


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
