"""`deltanet-hf convert TEACHER OUT`.

`prepare` opens the teacher, chooses what stays softmax and plans (`job.py`); the plan is printed; `convert` streams the
layers, compares the result with the teacher and writes the folder (`conversion.py`); its report is printed.
"""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from .command_options import takes
from .options import ConvertOptions


@takes(ConvertOptions)
def convert_command(
    teacher: Annotated[
        str,
        typer.Argument(metavar="TEACHER", help="Softmax model to convert: a folder, a Hub id or a .gguf file."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write the converted model to.")],
    **values: Any,
) -> None:
    """Converts a softmax model."""
    from rich.console import Console

    from deltanet_hf.publish import output_path

    from .conversion import convert
    from .device import description
    from .export.obstacles import check_exportable
    from .job import prepare, sole_conversion
    from .select.progress import shown_on
    from .select.run import unseen
    from .views import conversion_progress
    from .views.outlook import outlook
    from .views.plan_view import print_plan
    from .views.report_view import print_report

    options = ConvertOptions(**ConvertOptions.given(values))
    console = Console(stderr=options.as_json)
    out = output_path(out)
    with sole_conversion(out):
        with shown_on(console) if options.automatic else nullcontext(unseen) as show:
            job = prepare(teacher, out, options, show)
        if job.options.mixer == "window" != options.mixer and job.table.converted:
            console.print(
                "Windows alone (--mixer window): the default with --context, where layers slide, where states would "
                "take more than a sixth of the bytes, and for a selection that was made for them.",
                highlight=False,
            )
        if job.options.cache_bits != options.cache_bits:
            size = job.teacher.head_dim
            console.print(f"Heads of {size} channels have no form in 4 bits: the cache has 16.", highlight=False)
        if options.profile == "qwen3_5":
            for note in check_exportable(job.teacher.name, job.teacher.config, job.table.softmax):
                console.print(note, highlight=False, markup=False)
        print_plan(job.plan, console)
        console.print(f"Layers are run and fitted on {description(job.device)}, in float32.", highlight=False)
        if options.dry_run:
            if options.as_json:
                print(json.dumps(job.plan.to_json(), indent=2))
            return
        if options.text is None:
            console.print("Calibration text: the public-domain text shipped with deltanet-hf (choose another: --text).")
        try:
            fitted = [layer.converted or layer.normed for layer in job.plan.layers]
            with conversion_progress.shown_on(console, fitted, str(job.device)) as converted:
                report = convert(job, out, converted)
        except KeyboardInterrupt:
            console.print("Interrupted. The same command with --resume goes on after the last layer.", highlight=False)
            raise
        print_report(report, console)
        console.print(f"Written to {out}")
        console.print(
            outlook(report, out, job.teacher.config.vocab_size), highlight=False, markup=False, soft_wrap=True
        )
        if options.as_json:
            print(json.dumps(report, indent=2))
