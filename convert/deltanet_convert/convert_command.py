"""`deltanet-hf convert TEACHER OUT`."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deltanet_hf.errors import UserError
from deltanet_hf.mixers import MIXERS, AttentionKind

from .convert import convert
from .device import description
from .export.hooks import check_exportable, qwen3_5_folder
from .job import prepare, sole_conversion
from .options import DEFAULT_MIXER, DTYPES, LISTED_MIXERS, ConvertOptions, parse_size, set_keys
from .select.for_convert import AUTO
from .select.progress import shown_on
from .select.run import unseen
from .views import conversion_progress
from .views.plan_view import print_plan
from .views.report_view import print_report

DEFAULTS = ConvertOptions()
HYBRID = ("auto", DEFAULT_MIXER)  # default layers and mixer
PURE = ("all", "gated_deltanet")  # those of --pure, and of --profile qwen3_5, whose layer has no window


def convert_command(
    teacher: Annotated[
        str,
        typer.Argument(metavar="TEACHER", help="Softmax model to convert: a folder, a Hub id or a .gguf file."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write the converted model to.")],
    revision: Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit of TEACHER on the Hub.", show_default="the main branch"),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Layers to convert. `auto`: a quarter of the layers keeps softmax attention, chosen by recall: "
            "shipped for known teachers, measured where there is a GPU, otherwise evenly spread. `all`: convert every "
            "layer. `every:N`: layers N-1, 2N-1, ... keep softmax attention. `keep:3,7,11`: these layers keep it. "
            "`auto:25%` (or `auto:7`, `auto:40MB@32768`): keep this share or budget, chosen as `deltanet-hf select` "
            "does; slow without a GPU. FILE: the layers, or key/value heads, that keep it, such as the file that "
            "`deltanet-hf select` writes.",
            show_default=HYBRID[0],
        ),
    ] = None,
    mixer: Annotated[
        str | None,
        typer.Option(
            help=f"Layer that replaces softmax attention, by default `{DEFAULT_MIXER}`. Others: "
            f"{', '.join(LISTED_MIXERS)}. `NAME+window` has a softmax window beside the state, for those that have a "
            "state.",
        ),
    ] = None,
    pure: Annotated[
        bool,
        typer.Option(
            "--pure",
            help="Convert every layer to Gated DeltaNet alone: no softmax attention, no window, the least memory.",
        ),
    ] = False,
    profile: Annotated[
        str,
        typer.Option(
            help="Recommended settings. `faithful` keeps everything that the teacher's attention has. `qwen3_5` makes "
            "exactly Qwen3.5's layer, so that the model can be exported to other runtimes."
        ),
    ] = DEFAULTS.profile,
    no_training: Annotated[
        bool,
        typer.Option("--no-training", help="Take the settings that are better for a model that nobody will distil."),
    ] = False,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change one setting of the mixer, for example `rope=false`. Repeat the option for several. Keys of "
            "mixers with a state: "
            f"{set_keys()}.",
        ),
    ] = None,
    no_fit_memory: Annotated[
        bool,
        typer.Option(
            "--no-fit-memory",
            help="Start decay and write strength as in a model trained from scratch, instead of fitting them to the "
            "teacher.",
        ),
    ] = False,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Calibration text: .txt, .md or .jsonl (each also as .gz or .xz) or .parquet.",
            show_default="text shipped with deltanet-hf",
        ),
    ] = None,
    calibration_tokens: Annotated[
        int, typer.Option(help="Number of tokens of the calibration text that the layers are fitted on.")
    ] = DEFAULTS.calibration_tokens,
    cache_bits: Annotated[
        int,
        typer.Option(help="Bits of the keys and values that the model keeps in its cache: 16, 8 or 4."),
    ] = DEFAULTS.cache_bits,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"Dtype of the weights: {', '.join(DTYPES)}.", show_default="the teacher's"),
    ] = None,
    shard_size: Annotated[str, typer.Option(help="Largest size of a weight file.")] = "5GB",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Complete an interrupted conversion.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing folder OUT as soon as the new model is complete.")
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Random seed for the choice of calibration text and for start values.")
    ] = DEFAULTS.seed,
    device: Annotated[
        str | None,
        typer.Option(
            help="Device on which the layers are fitted, such as cpu, cuda or cuda:1.",
            show_default="a GPU if there is one",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan or the result as JSON.")] = False,
) -> None:
    """Converts a softmax model."""
    if qwen3_5_folder(teacher, revision) is not None:
        raise UserError(f"{teacher}: is a Gated DeltaNet model already; `deltanet-hf import {teacher} {out}` takes it")
    default_layers, default_mixer = PURE if pure or profile == "qwen3_5" else HYBRID
    if issubclass(MIXERS.get(mixer or "", object), AttentionKind):  # as good at recall as what would be kept
        default_layers = "all"
    if pure and (layers is not None or mixer is not None):
        raise UserError("--pure: converts all layers to gated_deltanet; leave out --layers and --mixer")
    options = ConvertOptions(
        revision=revision,
        layers=layers or default_layers,
        mixer=mixer or default_mixer,
        profile=profile,
        training=not no_training,
        changes=tuple(changes or ()),
        fit_memory=not no_fit_memory,
        text=text,
        calibration_tokens=calibration_tokens,
        cache_bits=cache_bits,
        dtype=dtype,
        shard_size=parse_size(shard_size),
        dry_run=dry_run,
        resume=resume,
        overwrite=overwrite,
        seed=seed,
        device=device,
        json=as_json,
    )
    console = Console(stderr=as_json)
    with sole_conversion(out):
        _convert(teacher, out, options, console)


def _convert(teacher: str, out: Path, options: ConvertOptions, console: Console) -> None:
    with shown_on(console) if options.layers.startswith(AUTO) else nullcontext(unseen) as show:
        job = prepare(teacher, out, options, show)
    if options.profile == "qwen3_5":
        for note in check_exportable(job.source.name, job.teacher.config, job.table.softmax):
            console.print(note, highlight=False, markup=False)
    print_plan(job.plan, console)
    together = f", {job.plan.layers_at_once} at a time" if job.plan.layers_at_once > 1 else ""
    console.print(f"Layers are run and fitted on {description(job.device)}, in float32{together}.", highlight=False)
    if options.dry_run:
        job.close()
        if options.json:
            print(json.dumps(job.plan.to_json(), indent=2))
        return
    if options.text is None:
        console.print("Calibration text: the public-domain text shipped with deltanet-hf (choose another: --text).")
    try:
        fitted = [layer.converted or layer.normed for layer in job.plan.layers]
        with conversion_progress.shown_on(console, fitted, job.plan.layers_at_once, str(job.device)) as converted:
            report = convert(job, converted)
    except KeyboardInterrupt:
        console.print("Interrupted. The same command with --resume goes on after the last layer.", highlight=False)
        raise
    print_report(report, console)
    console.print(f"Written to {job.out}")
    if options.json:
        print(json.dumps(report, indent=2))
