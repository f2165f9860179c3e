"""The options of `deltanet-hf eval` and `deltanet-hf report`; evaluation is imported when a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DATA_VARIABLE = "DELTANET_EVAL_DATA"


# lm-eval never ends its search for a text of `ruler_vt` of 768 tokens of SmolLM2.
Length = Annotated[int, typer.Option(min=1024, help="Tokens of the texts of --suite ruler.")]


def evaluate(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder or Hub id of a converted model or of a softmax model.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            envvar=DATA_VARIABLE,
            help="Folder of NAME/SPLIT.jsonl.gz files. Stock tasks whose files it holds need no network.",
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(help="Restrict softmax layers to this many recent tokens (a baseline without training)."),
    ] = None,
    sinks: Annotated[int, typer.Option(help="Number of first tokens that stay visible with --window.")] = 4,
    answers: Annotated[
        Path | None,
        typer.Option(help="File that keeps the answers: after an interruption, the same command continues from it."),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            help="Tasks instead of `--tasks`: standard, ruler, completion, ifeval, code, gsm8k, small or full."
        ),
    ] = None,
    length: Length = 4096,
) -> None:
    """Score MODEL with lm-eval. All other options are passed to lm-eval (`--tasks`, `--limit`, `--output_path` ...)."""
    from deltanet_hf.evaluation.tasks.lm_eval_run import run_lm_eval

    run_lm_eval(model, context.args, data=data, window=window, sinks=sinks, answers=answers, suite=suite, length=length)


def report(
    teacher: Annotated[str, typer.Argument(metavar="TEACHER", help="Folder or Hub id of the softmax teacher.")],
    students: Annotated[
        list[str], typer.Argument(metavar="STUDENT", help="Converted models, each given as FOLDER or NAME=FOLDER.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for report.md, report.json and the figures.")],
    suite: Annotated[
        str,
        typer.Option(
            help="Set of measurements: small, full, texts (recall, and KL on each --text; no tasks of lm-eval), long "
            "(KL on each --text in pieces of 1k, 8k and 32k), or the tasks alone of standard, ruler, completion, "
            "ifeval, code or gsm8k."
        ),
    ] = "small",
    data: Annotated[
        Path | None,
        typer.Option(envvar=DATA_VARIABLE, help="Folder of NAME/SPLIT.jsonl.gz files; the Hub is used without it."),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FILE, repeatable: measure perplexity and KL divergence on this text "
            "(.txt, .md or .jsonl, each also as .gz or .xz, .parquet, or .npy with token ids)."
        ),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Number of pieces of 1024 tokens per text.")] = 64,
    haystack: Annotated[
        Path | None, typer.Option(help="Text file for the needle task.", show_default="text shipped with deltanet-hf")
    ] = None,
    baselines: Annotated[
        str,
        typer.Option(
            help="Comma-separated list of window (softmax restricted to a window), equal-bytes (what costs no "
            "training, in the bytes and bits of each student), linear-off (linear layers give zero) and "
            "ablations (softmax layers, windows of layers with states, or those states taken away); or none.",
            show_default="all but ablations",
        ),
    ] = "window,equal-bytes,linear-off",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use at most this many rows of each measurement, for a trial.")
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Longest context for needles, pieces of text and speed, in tokens.",
            show_default="the teacher's limit",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device, such as cpu, cuda or cuda:1.", show_default="a GPU if there is one")
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="Dtype of weights and arithmetic: float32, bfloat16, float16, or auto (as stored; float32 on a CPU "
            "that has no bfloat16)."
        ),
    ] = "auto",
    processes: Annotated[
        int, typer.Option(min=1, help="Number of models to measure in parallel, each on its own GPU.")
    ] = 1,
    length: Length = 4096,
) -> None:
    """Compare TEACHER, STUDENTS and training-free baselines in one table, with figures and JSON."""
    texts = named_files(text or [])
    from deltanet_hf.evaluation.report.material import ReportOptions
    from deltanet_hf.evaluation.report.write_report import run_report

    options = ReportOptions(
        teacher=teacher,
        students=students,
        out=out,
        suite=suite,
        data=data,
        texts=texts,
        windows=windows,
        haystack=haystack,
        baselines=() if baselines == "none" else tuple(baselines.split(",")),
        limit=limit,
        max_length=max_length,
        device=device,
        dtype=dtype,
        processes=processes,
        length=length,
    )
    run_report(options, typer.echo)
    typer.echo((out / "report.md").read_text())
    typer.echo(f"Written to {out}", err=True)


def named_files(texts: list[str]) -> dict[str, Path]:
    """NAME -> FILE from the values of `--text`; UserError for a value that is not NAME=FILE."""
    files: dict[str, Path] = {}
    for entry in texts:
        name, separator, path = entry.partition("=")
        if not separator or not name or not path or name in files:
            from deltanet_hf.errors import UserError

            repeated = ", with another NAME for each file" * (name in files)
            raise UserError(f"--text {entry}: expected NAME=FILE{repeated}")
        files[name] = Path(path)
    return files
