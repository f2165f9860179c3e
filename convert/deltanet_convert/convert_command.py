"""`deltanet-hf convert TEACHER OUT`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deltanet_hf.errors import UserError
from deltanet_hf.mixers import MIXERS

from .convert import convert
from .export.hooks import check_exportable, import_qwen3_5, qwen3_5_folder
from .job import prepare
from .options import ConvertOptions, parse_size
from .views.plan_view import print_plan
from .views.report_view import print_report


def convert_command(
    teacher: Annotated[str, typer.Argument(help="Folder, hub id or .gguf file of the softmax model.")],
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    layers: Annotated[
        str,
        typer.Option(
            help="all | every:N (layers N-1, 2N-1, ... stay softmax) | keep:3,7,11 | a file that lists the kept layers."
        ),
    ] = "all",
    mixer: Annotated[str, typer.Option(help=f"Rule of the converted layers: {', '.join(MIXERS)}.")] = "gated_deltanet",
    profile: Annotated[
        str,
        typer.Option(
            help="faithful: keep everything that the teacher's attention has. qwen3_5: make exactly Qwen3.5's layer, "
            "so that the model can be exported to other runtimes."
        ),
    ] = "faithful",
    training: Annotated[
        bool,
        typer.Option(
            "--training/--no-training",
            help="Whether the model will be distilled. --no-training takes the settings that are better without.",
        ),
    ] = True,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE, repeatable: one setting of the mixer, such as rope=false."),
    ] = None,
    fit_memory: Annotated[
        bool,
        typer.Option(help="--no-fit-memory: decay and write strength begin as in a model trained from scratch."),
    ] = True,
    text: Annotated[
        Path | None,
        typer.Option(help="Calibration text: .txt, .jsonl or .parquet [default: the text shipped]."),
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(help="Tokens to fit on.")] = 8192,
    dtype: Annotated[str | None, typer.Option(help="float32 | bfloat16 | float16 [default: the teacher's].")] = None,
    shard_size: Annotated[str, typer.Option(help="Largest weight file, such as 5GB.")] = "5GB",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Complete an interrupted conversion.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT, once the new model is complete.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the choice of text and of the fit.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan or the result as JSON.")] = False,
) -> None:
    """Turn a softmax model into a Gated DeltaNet model; a Qwen3.5 text model, which is one, is imported."""
    if profile == "qwen3_5" and changes:
        raise UserError(f"--set {changes[0]}: --profile qwen3_5 fixes the settings; leave out one of the two")
    console = Console(stderr=as_json)
    if (native := qwen3_5_folder(teacher)) is not None:
        if changes:
            raise UserError(f"--set {changes[0]}: {teacher} is a Gated DeltaNet model already and is only imported")
        stored = None if dtype is None else ConvertOptions(dtype=dtype).torch_dtype
        import_qwen3_5(
            native,
            out,
            stored,
            parse_size(shard_size),
            resume=resume,
            overwrite=overwrite,
            dry_run=dry_run,
            console=console,
        )
        return
    options = ConvertOptions(
        layers=layers,
        mixer=mixer,
        profile=profile,
        training=training,
        changes=tuple(changes or ()),
        fit_memory=fit_memory,
        text=text,
        calibration_tokens=calibration_tokens,
        dtype=dtype,
        shard_size=parse_size(shard_size),
        dry_run=dry_run,
        resume=resume,
        overwrite=overwrite,
        seed=seed,
        json=as_json,
    )
    job = prepare(teacher, out, options)
    if profile == "qwen3_5":
        for note in check_exportable(job.source.name, job.teacher.config, job.table.softmax):
            console.print(note, highlight=False, markup=False)
    print_plan(job.plan, console)
    if dry_run:
        job.close()
        if as_json:
            print(json.dumps(job.plan.to_json(), indent=2))
        return
    if text is None:
        console.print("Calibration text: the public-domain text shipped with deltanet-hf (choose another: --text).")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("converting", total=job.teacher.num_layers)

        def show(done: int, total: int, what: str, figures: dict[str, Any]) -> None:
            error = f" relative MSE {figures['relative_mse']:.3f}" if "relative_mse" in figures else ""
            bar.update(task, completed=done, total=total, description=what + error)

        report = convert(job, show)
    print_report(report, console)
    console.print(f"Written to {job.out}")
    if as_json:
        print(json.dumps(report, indent=2))
