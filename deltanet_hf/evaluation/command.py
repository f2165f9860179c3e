"""`deltanet-hf eval`: lm-eval's own command line with this package's model, tasks and local data plugged in."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from deltanet_hf.errors import UserError

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
    if "--tasks" not in arguments and "-t" not in arguments and "--config" not in arguments:
        raise UserError("--tasks is missing; for instance --tasks demo_cloze,demo_repeat (no data needed)")
    arguments, user_tasks = _take_include_path(arguments)
    _quiet_lm_eval()
    from lm_eval.__main__ import cli_evaluate

    import deltanet_hf.evaluation.lm  # noqa: F401  registers the model class
    from deltanet_hf.evaluation.local_data import write_task_folder

    model_arguments: dict[str, str | int] = {"pretrained": model}
    if window is not None:
        model_arguments |= {"window": window, "sinks": sinks}
    with tempfile.TemporaryDirectory(prefix="deltanet-tasks-") as folder:
        write_task_folder(Path(folder), data, user_tasks)
        sys.argv = ["lm-eval", "run", "--model", "deltanet-hf", "--model_args", json.dumps(model_arguments)]
        sys.argv += ["--batch_size", "auto", "--include_path", folder, *arguments]
        cli_evaluate()


def _take_include_path(arguments: list[str]) -> tuple[list[str], Path | None]:
    """lm-eval takes one `--include_path`; the user's is merged into ours."""
    if "--include_path" not in arguments:
        return arguments, None
    at = arguments.index("--include_path")
    if at + 1 == len(arguments):
        raise UserError("--include_path needs a folder of task YAML files")
    return arguments[:at] + arguments[at + 2 :], Path(arguments[at + 1])


class _DropExpected(logging.Filter):
    """Drops lm-eval's warnings about what this package does on purpose."""

    expected = ("overrides existing task", "Custom kwargs can be passed", "is not of type `str`", "already-initialized")

    def filter(self, record: logging.LogRecord) -> bool:
        return not any(text in record.msg for text in self.expected)


def _quiet_lm_eval() -> None:
    for name in ("lm_eval.tasks._index", "lm_eval.api.task", "lm_eval.models.huggingface"):
        logging.getLogger(name).addFilter(_DropExpected())
