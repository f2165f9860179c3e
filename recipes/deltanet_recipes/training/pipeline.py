"""Runs a recipe: data, stages, final model. After a kill at any point, the same call continues the run."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from deltanet_convert.storage.safetensors_folder import read_json
from deltanet_hf.errors import UserError, one_line
from deltanet_hf.file_lock import locked
from deltanet_hf.journal import first_difference
from deltanet_hf.safe_write import write_atomically, writing
from deltanet_recipes.data.prepare import REPORT, RecipeData, write_report
from deltanet_recipes.schema import Align, Recipe, Stage, stage_name, stage_tokens
from deltanet_recipes.training.checksums import file_sum
from deltanet_recipes.training.estimate import estimates
from deltanet_recipes.training.feeds import check_share
from deltanet_recipes.training.final_model import save_final
from deltanet_recipes.training.finished_stages import finished_stages, load_stage, save_stage
from deltanet_recipes.training.logbook import LOG, Logbook, plain_console, read_log
from deltanet_recipes.training.model_pair import (
    check_models,
    load_student,
    load_tokenizer,
    mixers,
    stored_dtype,
    without_alignment,
)
from deltanet_recipes.training.optim import unset_rates
from deltanet_recipes.training.peers import peers_alive
from deltanet_recipes.training.plan_view import print_plan, show_plan
from deltanet_recipes.training.run_plots import draw_plots
from deltanet_recipes.training.runtime import Runtime
from deltanet_recipes.training.stages import StageRun

RUN = "run.json"
PROGRESS = (LOG, "checkpoints", "stages", "final")  # in the output folder of a run that has begun to train


def run(recipe: Recipe, kinds: tuple[str, ...] | None = None, console: Console | None = None) -> Path:
    """Run the stages of a recipe and return the folder of the final model.

    Args:
        kinds: run only stages of these kinds; None for all.
        console: where messages are printed; standard error by default.

    Raises UserError for what the user can put right, QualityError if training diverges.
    """
    runtime, stages = _checked(recipe, kinds)
    output = Path(recipe.output)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output: {output} cannot be written ({error.strerror}); choose another folder") from None
    with locked(output / "lock", output, "training run") if runtime.main else nullcontext(), peers_alive(runtime.world):
        return _run(recipe, stages, runtime, output, console)


def show_run(recipe: Recipe, console: Console | None = None) -> None:
    """Print what each stage of a recipe trains, its memory and its time. No text is read and nothing is written.

    Raises UserError as `run` does, but for what is wrong with the text.
    """
    runtime, stages = _checked(recipe, None)
    student = load_student(recipe.student, None if runtime.bf16 else torch.float32)
    plan = list(zip(stages, estimates(stages, student, runtime, recipe.data.holdout_tokens), strict=True))
    print_plan(_title(recipe), plan, runtime, console or plain_console())


def report_data(output: Path, reports: list[dict[str, Any]]) -> Path:
    """Write the reports of all texts (`write_report`), unless a run has begun in this folder, which wrote its own.

    Raises UserError if that run has another text.
    """
    if not _begun(output):
        return write_report(output, reports)
    before = list(filter(None, read_json(output / RUN).get("text", [])))  # nothing is counted of recall rows
    _refuse_another(output, first_difference({"text": before}, {"text": _counts(reports)}))
    return output / REPORT


def _checked(recipe: Recipe, kinds: tuple[str, ...] | None) -> tuple[Runtime, list[Stage]]:
    """The runtime of a recipe, and those of its stages that will run, after all checks of models and stages."""
    stages = [stage for stage in recipe.stages if kinds is None or stage.kind in kinds]
    if not stages:
        raise UserError(f"stages: the recipe has no {' or '.join(kinds or ())} stage")
    runtime = Runtime(recipe.engine)
    for stage in stages:
        check_share(stage, runtime.world)
    return runtime, without_alignment(recipe, check_models(recipe), stages)


def _title(recipe: Recipe) -> str:
    return f"{recipe.student} -> {recipe.output}"


def _run(recipe: Recipe, stages: list[Stage], runtime: Runtime, output: Path, console: Console | None) -> Path:
    decisive = _decisive(recipe, stages)
    _claim(output, decisive, runtime)
    logbook = Logbook(output, recipe, runtime.main, console)
    tokenizer = load_tokenizer(recipe.student)
    for stage in recipe.stages:
        if isinstance(stage, Align) and stage not in stages:
            logbook.say(f"{stage_name(stage)}: skipped, for the layers of {recipe.student} have the teacher's weights")
    with runtime.main_first():
        data = RecipeData.of(recipe, tokenizer, logbook.say)
    data.training.check(sum(map(stage_tokens, stages)))

    torch.manual_seed(recipe.seed)
    student = load_student(recipe.student, None if runtime.bf16 else torch.float32)
    if runtime.main:
        decisive |= {"student": _student_sums(Path(recipe.student)), "text": _counts(data.reports)}
    _claim(output, decisive, runtime)
    if runtime.main:
        write_report(output, data.reports)
    dtype = stored_dtype(student, recipe.student)
    files = [output / "stages" / f"{number:02d}-{stage_name(stage)}.safetensors" for number, stage in enumerate(stages)]
    finished = finished_stages(files, runtime, logbook.say)
    if finished:
        names = [stage_name(stage) for stage in stages]
        rest = f"goes on with {names[finished]}" if names[finished:] else "only the final model is written"
        logbook.say(f"finished before: {', '.join(names[:finished])}; {rest}")
    if runtime.main:
        plan = estimates(stages, student, runtime, recipe.data.holdout_tokens)
        show_plan(_title(recipe), stages, plan, finished, runtime, logbook)
    if rates := unset_rates(stages[finished:], student):
        logbook.say(rates)

    converted = len(mixers(student))
    if finished:
        data.training.state = load_stage(files[finished - 1], student)
    steps_before = 0
    for number, (stage, file) in enumerate(zip(stages, files, strict=True)):
        if number >= finished:
            checkpoints = output / "checkpoints" / file.stem
            run_stage = StageRun(stage, recipe, runtime, student, data, logbook, checkpoints, steps_before)
            with runtime.interrupts.delayed():
                student = run_stage.run()
            save_stage(file, student, data.training.state, runtime)
            logbook.tables()
        steps_before += stage.steps * (converted if stage.layerwise else 1)

    final = output / "final"
    if runtime.main:
        trained_by = recipe.model_copy(update={"stages": tuple(stages)})
        save_final(final, student, tokenizer, trained_by, dtype, data.reports)
        with writing(output):
            draw_plots(output, read_log(output))
    logbook.close()
    runtime.barrier()
    logbook.say(f"final model: {final}")
    return final


def _decisive(recipe: Recipe, stages: list[Stage]) -> dict[str, Any]:
    """The settings that decide the result, as JSON."""
    held_at_once = {"__all__": {"micro_batch_rows", "loss_chunk"}}
    without: dict[str, Any] = {"log": True, "engine": True, "output": True, "stages": held_at_once}
    return {
        "recipe": recipe.model_dump(mode="json", exclude=without),
        "run": [stage_name(stage) for stage in stages],
    }


def _student_sums(folder: Path) -> dict[str, str]:
    """The beginning of the SHA-256 of the student's config and of each file of its weights."""
    return {file.name: file_sum(file)[:16] for file in (folder / "config.json", *sorted(folder.glob("*.safetensors")))}


def _counts(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The reports of the text without its settings, as JSON."""
    found: list[dict[str, Any]] = json.loads(json.dumps(reports))
    return [{key: value for key, value in report.items() if key != "source"} for report in found]


def _claim(output: Path, decisive: dict[str, Any], runtime: Runtime) -> None:
    """Write what decides the result into the output folder, or compare it with what is there.

    This keeps a resumed run from mixing two. A run of the first stages alone (`deltanet-hf align`) may be continued
    with the others. What was not recorded before is not compared. Raises UserError if the folder holds another run,
    unless that one ended before its first step.
    """
    path = output / RUN
    if runtime.main:
        try:
            before = json.loads(path.read_text()) if path.is_file() else decisive
            begun = len(before["run"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}: is damaged ({one_line(error, 200)}); choose another output, or delete it"
            ) from None
        now = {**before, **decisive, "run": decisive["run"][:begun]}
        if _begun(output):
            _refuse_another(output, first_difference({**decisive, **before}, now))
        write_atomically(path, json.dumps({**before, **decisive}, indent=1).encode())
    runtime.barrier()


def _begun(output: Path) -> bool:
    return any((output / name).exists() for name in PROGRESS)


def _refuse_another(output: Path, other: str | None) -> None:
    if other:
        raise UserError(f"output: {output} holds a run with another {other}; choose another folder or delete it")
