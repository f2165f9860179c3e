"""`deltanet-hf eval`: lm-eval's own command line with this package's model, tasks and local data plugged in."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.patches import quiet_lm_eval, replaced

EVAL_CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def evaluate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder or hub id of a converted model or of a teacher.")],
    data: Annotated[
        Path | None,
        typer.Option(
            envvar="DELTANET_EVAL_DATA",
            help="Folder of NAME/SPLIT.jsonl.gz files; stock tasks found there need no network.",
        ),
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Restrict softmax layers to this many recent tokens (untrained baseline).")
    ] = None,
    sinks: Annotated[int, typer.Option(help="First tokens that stay visible with --window.")] = 4,
) -> None:
    """Score MODEL with lm-eval; every other argument is lm-eval's own (`--tasks`, `--limit`, `--output_path` ...)."""
    run_lm_eval(model, context.args, data=data, window=window, sinks=sinks)


def run_lm_eval(
    model: str, arguments: list[str], data: Path | None = None, window: int | None = None, sinks: int = 4
) -> None:
    """Run lm-eval's command line on `model` with extra `arguments`; see `evaluate`."""
    if not _requested_tasks(arguments):
        raise UserError("--tasks is missing; for instance --tasks demo_cloze,demo_repeat (no data needed)")
    arguments, user_tasks = _take_include_path(arguments)
    quiet_lm_eval()
    from lm_eval import tasks
    from lm_eval.__main__ import cli_evaluate

    import deltanet_hf.evaluation.lm  # noqa: F401  registers the model class
    from deltanet_hf.evaluation.local_data import write_task_folder

    model_arguments: dict[str, str | int] = {"pretrained": model}
    if window is not None:
        model_arguments |= {"window": window, "sinks": sinks}
    command = ["lm-eval", "run", "--model", "deltanet-hf", "--model_args", json.dumps(model_arguments)]
    with tempfile.TemporaryDirectory(prefix="deltanet-tasks-") as folder, contextlib.ExitStack() as undo:
        known = write_task_folder(Path(folder), data, user_tasks)
        if set(_requested_tasks(arguments)) <= set(known):
            # Reading the index of all stock tasks takes longer than the demo's tasks themselves.
            undo.enter_context(replaced(tasks, "TaskManager", partial(tasks.TaskManager, include_defaults=False)))
        arguments = [*command, "--batch_size", "auto", "--include_path", folder, *arguments]
        undo.enter_context(replaced(sys, "argv", arguments))
        try:
            cli_evaluate()
        except OSError as error:  # what both the model's and the data set's loaders raise
            line = str(error).splitlines()[0]
            raise UserError(f"{model}: {line}; without a network, give local folders (MODEL, --data)") from error
        except ValueError as error:
            if "Tasks not found" not in str(error):
                raise
            raise UserError(f"--tasks: {error}; `lm-eval ls tasks` lists them") from error


def _requested_tasks(arguments: list[str]) -> list[str]:
    """The values of `--tasks`, which lm-eval takes separated by spaces or commas."""
    names: list[str] = []
    taking = False
    for argument in arguments:
        if argument.startswith("-"):
            taking = argument in ("--tasks", "-t")
        elif taking:
            names += argument.split(",")
    return names


def _take_include_path(arguments: list[str]) -> tuple[list[str], Path | None]:
    """lm-eval takes one `--include_path`; the user's is merged into ours."""
    if "--include_path" not in arguments:
        return arguments, None
    at = arguments.index("--include_path")
    if at + 1 == len(arguments):
        raise UserError("--include_path needs a folder of task YAML files")
    return arguments[:at] + arguments[at + 2 :], Path(arguments[at + 1])


def report(
    teacher: Annotated[str, typer.Argument(help="Folder or hub id of the softmax teacher.")],
    students: Annotated[list[str], typer.Argument(help="Converted models: FOLDER or NAME=FOLDER.")],
    out: Annotated[Path, typer.Option(help="Folder for report.md, report.json and the plots.")],
    suite: Annotated[str, typer.Option(help="small, full, or texts (no lm-eval tasks).")] = "small",
    data: Annotated[
        Path | None,
        typer.Option(envvar="DELTANET_EVAL_DATA", help="Folder of NAME/SPLIT.jsonl.gz files; default: the hub."),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="NAME=FILE, repeatable: perplexity and KL on it (.txt, .jsonl[.gz|.xz], .npy token ids)."),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of 1024 tokens per text.")] = 64,
    haystack: Annotated[Path | None, typer.Option(help="Text of the needle task; default: the shipped one.")] = None,
    last_word: Annotated[
        Path | None, typer.Option(help="JSON {name: [[context ids, target ids], ...]}: greedy exact match.")
    ] = None,
    baselines: Annotated[str, typer.Option(help="Comma-separated: window, linear-off, scratch; or none.")] = (
        "window,linear-off,scratch"
    ),
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many rows of everything (a trial).")] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Longest needle and speed context; default: the teacher's.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda, cuda:1, cpu; default: cuda if there is one.")] = None,
    dtype: Annotated[str, typer.Option(help="auto (as stored), bfloat16, float32.")] = "auto",
    processes: Annotated[int, typer.Option(min=1, help="Models measured at once, each on a GPU of its own.")] = 1,
) -> None:
    """Compare TEACHER, STUDENTS and untrained baselines: one table, plots and JSON."""
    from deltanet_hf.evaluation.bench import ReportOptions
    from deltanet_hf.evaluation.report import run_report

    options = ReportOptions(
        teacher=teacher,
        students=students,
        out=out,
        suite=suite,
        data=data,
        texts=_named_files(text or []),
        windows=windows,
        haystack=haystack,
        last_word=last_word,
        baselines=() if baselines == "none" else tuple(baselines.split(",")),
        limit=limit,
        max_length=max_length,
        device=device,
        dtype=dtype,
        processes=processes,
    )
    run_report(options, typer.echo)
    typer.echo((out / "report.md").read_text())


def _named_files(texts: list[str]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for entry in texts:
        name, separator, path = entry.partition("=")
        if not separator or not name or not path:
            raise UserError(f"--text {entry}: expected NAME=FILE")
        files[name] = Path(path)
    return files
