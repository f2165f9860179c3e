"""Runs lm-eval's own command line with this package's model class, tasks and local data."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
import tempfile
from functools import partial
from pathlib import Path

from lm_eval import __main__ as lm_eval_command
from lm_eval import evaluator, tasks
from lm_eval.loggers.utils import get_commit_from_path
from transformers import PreTrainedTokenizerBase

import deltanet_hf.evaluation.tasks.lm_eval_model  # noqa: F401  registers the model class with lm-eval
from deltanet_hf.errors import UserError, one_line
from deltanet_hf.evaluation.tasks.code_eval import code_runs_here
from deltanet_hf.evaluation.tasks.lm_eval_patches import quiet_lm_eval, replaced
from deltanet_hf.evaluation.tasks.local_data import blimp_paradigms, missing_files, write_task_folder
from deltanet_hf.evaluation.tasks.ruler import Ruler
from deltanet_hf.evaluation.tasks.suites import RULER_LENGTH, SUITES, check_packages, code_allowed
from deltanet_hf.hub import loadable_folder
from deltanet_hf.loading import chosen_device, load_config, load_tokenizer

_ERROR_LENGTH = 300
MOST = 10**9  # tokens of a window, and sinks


def run_lm_eval(
    model: str,
    arguments: list[str],
    data: Path | None = None,
    window: int | None = None,
    sinks: int = 4,
    answers: Path | None = None,
    suite: str | None = None,
    length: int = RULER_LENGTH,
) -> None:
    """Evaluate a model with lm-eval's command line.

    Args:
        model: folder or Hub id.
        arguments: command-line arguments of lm-eval; `--tasks` is required without `suite`.
        data: folder of NAME/SPLIT.jsonl.gz files; None loads all rows from the Hub.
        window: number of recent tokens that softmax layers may see; None for no restriction.
        sinks: number of first tokens that stay visible under `window`.
        answers: file that keeps the answers, from which an interrupted evaluation continues; None for no file.
        suite: a name in `SUITES`, whose tasks are run; None for those of `arguments`.
        length: tokens of RULER's texts, in the suite of this name.

    Raises UserError for unknown tasks, and for models, data sets and files of answers that cannot be used.
    """
    # --NAME=VALUE in the form of all others
    arguments = [part for one in arguments for part in (one.split("=", 1) if one.startswith("--") else [one])]
    requested = requested_tasks(arguments)
    if suite is not None:
        if requested:
            raise UserError("--suite and --tasks: give one of them")
        requested = suite_tasks(suite, data)
        arguments = [*arguments, "--tasks", ",".join(requested)]
    if not requested:
        raise UserError("--tasks or --suite is missing; for instance --tasks demo_cloze,demo_repeat (no data needed)")
    if window is not None and not (1 <= window <= MOST and 0 <= sinks <= MOST):
        raise UserError(
            f"--window {window}, --sinks {sinks}: a window has 1 to {MOST:,} tokens, sinks are 0 to {MOST:,}"
        )
    arguments, user_tasks = _take_include_path(arguments)
    folder = loadable_folder(model)
    load_config(model, folder)
    _check_arguments(arguments, load_tokenizer(model, folder))
    quiet_lm_eval()
    model_arguments: dict[str, str | int] = {"pretrained": str(folder)}
    if window is not None:
        model_arguments |= {"window": window, "sinks": sinks}
    if answers is not None:
        model_arguments["answers"] = str(answers)
    command = ["lm-eval", "run", "--model", "deltanet-hf", "--model_args", json.dumps(model_arguments)]
    with tempfile.TemporaryDirectory(prefix="deltanet-tasks-") as tasks_folder, contextlib.ExitStack() as undo:
        known = write_task_folder(Path(tasks_folder), data, user_tasks)
        if suite == "ruler":
            known += Ruler(length, str(folder)).write_tasks(Path(tasks_folder))
        if set(requested) <= set(known):
            # Reading the index of all stock tasks takes longer than running the demo's tasks.
            undo.enter_context(replaced(tasks, "TaskManager", partial(tasks.TaskManager, include_defaults=False)))
        if code_allowed():
            arguments = ["--confirm_run_unsafe_code", *arguments]
        undo.enter_context(code_runs_here())
        arguments = [*command, "--batch_size", "auto", "--include_path", tasks_folder, *arguments]
        undo.enter_context(replaced(sys, "argv", arguments))
        # The stock function runs git, which prints an error where there is no repository.
        undo.enter_context(replaced(evaluator, "get_git_commit_hash", partial(get_commit_from_path, Path.cwd())))
        try:
            lm_eval_command.cli_evaluate()
        except OSError as error:  # raised by the loaders of models and of data sets
            line = one_line(error, _ERROR_LENGTH)
            raise UserError(f"{model}: {line}; without a network, give local folders (MODEL, --data)") from error
        except ValueError as error:
            if "Tasks not found" not in str(error):
                raise
            raise UserError(f"--tasks: {one_line(error)}; `lm-eval ls tasks` lists them") from error


def _check_arguments(arguments: list[str], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError for mistakes that lm-eval finds late, or by an error of its own."""
    for option, value in itertools.pairwise(arguments):
        if option == "--device":
            chosen_device(value)
        if option not in ("--limit", "-L"):
            continue
        with contextlib.suppress(ValueError):  # lm-eval says what is no number
            if not 0 < float(value) < math.inf:
                raise UserError(f"{option}: expected a number of rows above 0, or a share below 1")
    if {*arguments} & {"--log_samples", "-s", "--predict_only"} and not {*arguments} & {"--output_path", "-o"}:
        raise UserError("--log_samples: needs a folder for the samples; add --output_path FOLDER")
    if "--apply_chat_template" in arguments and tokenizer.chat_template is None:
        raise UserError("--apply_chat_template: the model's tokenizer has no chat template; leave it out")


def suite_tasks(suite: str, data: Path | None) -> list[str]:
    """Names of a suite's tasks. Raises UserError for an unknown suite, and if rows or packages are missing."""
    if suite not in SUITES or not SUITES[suite].tasks:
        known = ", ".join(name for name, found in SUITES.items() if found.tasks)
        raise UserError(f"--suite {suite}: unknown; choose one of {known}")
    check_packages(suite)
    tasks = [task.name for task in SUITES[suite].tasks]
    if data is not None and suite != "ruler" and (missing := missing_files(tasks, data)):
        raise UserError(f"--suite {suite}: {data} has no {', '.join(missing)}; without --data, rows come from the Hub")
    return [name for task in tasks for name in (blimp_paradigms() if task == "blimp" else [task])]


def requested_tasks(arguments: list[str]) -> list[str]:
    """The values of `--tasks`, which lm-eval accepts separated by spaces or commas."""
    names: list[str] = []
    taking = False
    for argument in arguments:
        if argument.startswith("-"):
            taking = argument in ("--tasks", "-t")
        elif taking:
            names += filter(None, argument.split(","))
    return names


def _take_include_path(arguments: list[str]) -> tuple[list[str], Path | None]:
    """The arguments without `--include_path FOLDER`, and FOLDER.

    lm-eval accepts one such folder only, so the user's tasks are written into the folder of this package's tasks.
    """
    if "--include_path" not in arguments:
        return arguments, None
    at = arguments.index("--include_path")
    if at + 1 == len(arguments):
        raise UserError("--include_path needs a folder of task YAML files")
    return arguments[:at] + arguments[at + 2 :], Path(arguments[at + 1])
