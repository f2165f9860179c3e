"""`deltanet-hf import MODEL OUT`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deltanet_hf.errors import UserError
from deltanet_hf.publish import output_path

from ..command_options import DTYPES, parse_size, torch_dtype


def import_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Qwen3.5 text model, or an export: a folder or a Hub id.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write the model to.")],
    revision: Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit of MODEL on the Hub.", show_default="the main branch"),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"Dtype of the weights: {', '.join(DTYPES)}.", show_default="the model's"),
    ] = None,
    shard_size: Annotated[str, typer.Option(help="Largest size of a weight file.")] = "5GB",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the result's type and size, and stop.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Complete an interrupted import.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing folder OUT as soon as the new model is complete.")
    ] = False,
) -> None:
    """Gives a Qwen3.5 text model, which has Gated DeltaNet layers already, the names of this package.

    An export of `deltanet-hf export` becomes the model that it was.
    """
    from deltanet_hf.hub import model_folder
    from deltanet_hf.inside import check_links

    from ..storage.safetensors_folder import read_json
    from ..teacher_model import is_qwen3_5
    from .import_qwen3_5 import plan_import, write_import
    from .progress import progress_bar

    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype: got '{dtype}', expected one of {', '.join(DTYPES)}")
    folder = model_folder(model, revision, weights=False)
    check_links(folder)
    file = folder / "config.json"
    if not file.is_file() or not is_qwen3_5(read_json(file)):
        raise UserError(f"{model}: holds no Qwen3.5 text model; `deltanet-hf convert` takes softmax models")
    folder = model_folder(model, revision)
    out = output_path(out)
    if out == folder.resolve() or folder.resolve() in out.parents:
        raise UserError(f"{out}: lies in the model's folder {folder}; choose another place")
    plan = plan_import(folder, torch_dtype(dtype) if dtype else None, parse_size(shard_size))
    console = Console()
    if plan.record:
        console.print(f"{folder} is an export written by deltanet-hf; the export is undone.", highlight=False)
    console.print(f"Result: {plan.config.model_type}, {plan.layout.nbytes / 1e9:.2f} GB.", highlight=False)
    if dry_run:
        return
    with progress_bar(console, "importing") as report:
        write_import(plan, out, resume=resume, overwrite=overwrite, progress=report)
    console.print(f"Written to {out}", highlight=False)
