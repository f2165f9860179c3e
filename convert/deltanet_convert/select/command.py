"""`deltanet-hf select TEACHER`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deltanet_hf.errors import UserError
from deltanet_hf.publish import output_path

from ..export.hooks import qwen3_5_folder
from ..options import DEFAULT_MIXER, LISTED_MIXERS, ConvertOptions
from ..storage.teacher_source import Source, resolve_source
from ..teacher_model import open_teacher
from .budget import Budget
from .journal import SelectionJournal
from .methods import EXPORTABLE
from .progress import shown_on
from .run import run_selection
from .select_options import SelectOptions
from .task import plan_selection
from .units import UNITS
from .view import print_selection

DEFAULTS = SelectOptions(Budget.parse("25%"))


def select_command(
    teacher: Annotated[
        str,
        typer.Argument(metavar="TEACHER", help="Softmax model to convert later: a folder, a Hub id or a .gguf file."),
    ],
    revision: Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit of TEACHER on the Hub.", show_default="the main branch"),
    ] = None,
    out: Annotated[Path, typer.Option(help="File to write; `deltanet-hf convert --layers FILE` reads it.")] = Path(
        "selection.json"
    ),
    unit: Annotated[
        str, typer.Option(help=f"Choose whole layers or single key/value heads: {', '.join(UNITS)}.")
    ] = DEFAULTS.unit,
    method: Annotated[
        str,
        typer.Option(
            help="`forward` restricts everything to windows and gives full attention back to the unit that lowers the "
            "loss on recall probes most, one by one. `gradient` takes the unit with the steepest derivative instead. "
            "`kl` is `forward` by the KL divergence from the teacher on running text. `uniform` spreads the units "
            "evenly, without running the teacher."
        ),
    ] = DEFAULTS.method,
    exportable: Annotated[
        bool,
        typer.Option(
            "--exportable",
            help="Keep every n-th layer, which mlx-lm and llama.cpp need; the budget decides n, no method runs.",
        ),
    ] = False,
    keep: Annotated[
        str,
        typer.Option(
            help="What to keep: a number of units such as 7, a share such as 25%, `40MB@32768` (bytes of the converted "
            "model's cache for a sequence of that length), or `5%@32768` (a share of the teacher's cache)."
        ),
    ] = DEFAULTS.budget.text,
    mixer: Annotated[
        str,
        typer.Option(
            help="Layer that will replace softmax attention, whose cache a budget in bytes counts; by default "
            f"`{DEFAULT_MIXER}`, as in `deltanet-hf convert`. Others: {', '.join(LISTED_MIXERS)}, or `NAME+window`.",
            show_default=False,
        ),
    ] = DEFAULT_MIXER,
    window: Annotated[int, typer.Option(help="Number of tokens that units see which are not kept.")] = DEFAULTS.window,
    sinks: Annotated[
        int, typer.Option(help="Number of tokens at the start of the text that they see besides.")
    ] = DEFAULTS.sinks,
    length: Annotated[int, typer.Option(help="Tokens per probe; cut to the teacher's context.")] = DEFAULTS.length,
    probes: Annotated[
        int, typer.Option(help="Number of probes of each format; `kl` takes four times as many rows of text.")
    ] = DEFAULTS.probes,
    seed: Annotated[int, typer.Option(help="Random seed for the probes.")] = DEFAULTS.seed,
    device: Annotated[
        str | None, typer.Option(help="Device, such as cpu, cuda or cuda:1.", show_default="a GPU if there is one")
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace an existing file, and discard an unfinished run with other options."),
    ] = False,
) -> None:
    """Chooses the layers or key/value heads that stay softmax. An interrupted run is continued by the same command."""
    if exportable and method != DEFAULTS.method:
        raise UserError(f"--exportable: keeps every n-th layer, so --method {method} has no effect; leave out one")
    options = SelectOptions(
        budget=Budget.parse(keep),
        unit=unit,
        method=EXPORTABLE if exportable else method,
        window=window,
        sinks=sinks,
        length=length,
        probes=probes,
        seed=seed,
        device=device,
        overwrite=overwrite,
    )
    if qwen3_5_folder(teacher, revision) is not None:
        raise UserError(f"{teacher}: is a Gated DeltaNet model already; there is nothing to select")
    out = output_path(out)
    console = Console()
    table_options = ConvertOptions(mixer=mixer)
    source = resolve_source(teacher, out.parent / f".{out.name}.teacher", None, revision)
    with removed_unless_unfinished(source, out):
        opened = open_teacher(source.folder)
        task = plan_selection(source, opened, options, table_options.table(opened.num_layers, (), opened.config), out)
        for note in task.notes:
            console.print(note, highlight=False, markup=False)
        with shown_on(console) as show:
            selection = run_selection(task, show)
    print_selection(selection, task.memory, len(task.candidates.units), console)
    console.print(f"Written to {out}", highlight=False)


@contextmanager
def removed_unless_unfinished(source: Source, out: Path) -> Iterator[None]:
    """Removes the copy of a GGUF teacher at the end, unless an unfinished selection can continue with it."""
    try:
        yield
    finally:
        if source.temporary and not SelectionJournal.path_of(out).exists():
            shutil.rmtree(source.folder, ignore_errors=True)
