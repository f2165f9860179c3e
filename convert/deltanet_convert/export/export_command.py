"""`deltanet-hf export MODEL OUT`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from deltanet_hf.errors import UserError
from deltanet_hf.publish import output_path

from ..command_options import DTYPES, parse_size, torch_dtype

if TYPE_CHECKING:
    import torch

DEFAULT_SHARD_SIZE = "5GB"


def export_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or Hub id of a converted model.")],
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="Folder to create; with `--format gguf`, the file.")
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit of MODEL on the Hub.", show_default="the main branch"),
    ] = None,
    style: Annotated[
        str,
        typer.Option("--format", help="Format to write: transformers (also for vLLM), mlx or gguf (for llama.cpp)."),
    ] = "transformers",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of the weights: float32, bfloat16 or float16, and q8_0 for gguf.",
            show_default="the model's; float16 for gguf",
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Print whether MODEL can be exported, and stop.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare the result with MODEL in every supported runtime installed here.")
    ] = False,
    prompt: Annotated[
        str | None, typer.Option(help="With --verify: let every runtime continue this text, and print the results.")
    ] = None,
    shard_size: Annotated[str, typer.Option(help="Largest size of a weight file.")] = DEFAULT_SHARD_SIZE,
    resume: Annotated[bool, typer.Option("--resume", help="Complete an interrupted export.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT as soon as the new export is complete.")
    ] = False,
) -> None:
    """Write a converted model as a Qwen3.5 text model, which other runtimes can load."""
    from ..storage.saved_tokenizer import load_tokenizer
    from .export_plan import plan_export
    from .gguf import OUTTYPES, write_gguf
    from .model_folder import ConvertedModel
    from .obstacles import FORMATS
    from .progress import progress_bar
    from .runtime_check import verify_export
    from .stream_export import write_export

    if style not in FORMATS:
        raise UserError(f"--format: got '{style}', expected one of {', '.join(FORMATS)}")
    console = Console()
    source = _model_folder(model, revision)
    if check:
        print_check(source, console)
        return
    if out is None:
        raise UserError("OUT: missing; give the folder to create, or --check to see whether MODEL can be exported")
    out = output_path(out)
    if out == source.resolve() or source.resolve() in out.parents:
        raise UserError(f"{out}: lies in the model's folder {source}; choose another place")
    refuse_obstacles(source, style)
    opened = ConvertedModel.open(source)
    allowed = OUTTYPES if style == "gguf" else DTYPES
    if dtype is not None and dtype not in allowed:
        raise UserError(f"--dtype: got '{dtype}', expected one of {', '.join(allowed)} for --format {style}")
    if prompt is not None and not verify:
        raise UserError("--prompt: only the runtimes that --verify runs continue it; add --verify")
    if verify:
        load_tokenizer(source)  # the comparison needs text; a missing tokenizer is reported before any work
    stored = torch_dtype(dtype) if dtype and style != "gguf" else None
    plan = plan_export(opened, stored, parse_size(shard_size), style)
    for line in plan.notes():
        console.print(line, highlight=False)
    with progress_bar(console, "exporting") as report:
        if style == "gguf":
            write_gguf(plan, out, dtype or "float16", resume=resume, overwrite=overwrite, progress=report)
        else:
            write_export(plan, out, style, resume=resume, overwrite=overwrite, progress=report)
    console.print(f"Written to {out}", highlight=False)
    if verify:
        verify_export(opened, out, style, plan.dtype, weights_dtype(plan.dtype, style, dtype), console, prompt)


def weights_dtype(stored: torch.dtype, style: str, requested: str | None) -> torch.dtype | None:
    """The dtype of the exported weights; None if they are quantised."""
    if style != "gguf":
        return stored
    name = requested or "float16"
    return torch_dtype(name) if name in DTYPES else None


def _model_folder(model: str, revision: str | None) -> Path:
    """The model's folder; a hub id is downloaded."""
    if model.endswith(".gguf"):
        raise UserError(f"{model}: is a GGUF file already; give the converted model's folder")
    from ..storage.teacher_source import resolve_source

    return resolve_source(model, Path("unused"), None, revision).folder


def refuse_obstacles(folder: Path, style: str) -> None:
    """Raises a UserError that lists every obstacle to the format with its remedy; returns if there is none."""
    from .model_folder import read_converted_config
    from .obstacles import export_obstacles

    found = [o for o in export_obstacles(read_converted_config(folder)) if style in o.formats]
    if found:
        listed = "".join(f"\n  {obstacle}" for obstacle in found)
        raise UserError(f"{folder}: cannot be exported as {style}:{listed}")


def print_check(folder: Path, console: Console) -> None:
    """Prints which formats are possible and each obstacle once; UserError if no format is possible."""
    from deltanet_hf.models.layers import LayerTable

    from .model_folder import read_converted_config
    from .obstacles import FORMATS, export_obstacles
    from .slots import uneven_note

    config: Any = read_converted_config(folder)
    obstacles = export_obstacles(config)
    uneven = uneven_note(LayerTable.of(config).softmax, config.num_hidden_layers)
    for style in FORMATS:
        console.print(f"{style}: {'no' if any(style in o.formats for o in obstacles) else 'yes'}", highlight=False)
    for obstacle in obstacles:
        formats = "" if obstacle.formats == FORMATS else f" ({', '.join(obstacle.formats)} only)"
        console.print(f"  {obstacle}{formats}", highlight=False, markup=False)
    if uneven:
        console.print(uneven, highlight=False, markup=False)
    if all(any(style in o.formats for o in obstacles) for style in FORMATS):
        raise UserError(f"{folder}: cannot be exported; see above")
