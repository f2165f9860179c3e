"""`deltanet-hf select TEACHER`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltanet_hf.publish import output_path

from ..command_options import takes
from .select_options import SelectOptions

if TYPE_CHECKING:
    from ..storage.teacher_source import Source
    from .run import Show
    from .selection_file import Selection
    from .task import SelectionTask


@takes(SelectOptions)
def select_command(
    teacher: Annotated[
        str,
        typer.Argument(metavar="TEACHER", help="Softmax model to convert later: a folder, a Hub id or a .gguf file."),
    ],
    **values: Any,
) -> None:
    """Chooses the layers or key/value heads that stay softmax. An interrupted run is continued by the same command."""
    from rich.console import Console

    from .progress import shown_on
    from .view import print_selection

    options = SelectOptions(**SelectOptions.given(values))
    console = Console()
    with shown_on(console) as show:
        selection, task = selected(teacher, options, show)
    print_selection(selection, task, console)
    console.print(f"Written to {output_path(options.out)}", highlight=False)


def selected(teacher: str, options: SelectOptions, show: Show) -> tuple[Selection, SelectionTask]:
    """Runs a selection and writes its file.

    Args:
        show: called with the progress.
    """
    from ..options import ConvertOptions
    from ..storage.teacher_source import resolve_source
    from ..teacher_model import open_teacher
    from .run import run_selection
    from .task import plan_selection
    from .teacher_defaults import with_defaults

    out = output_path(options.out)
    # What `convert` makes; where nothing is measured, no windows are planned for a budget.
    profile = "qwen3_5" if options.exportable else None
    keep = (options.keep and options.keep.text) if options.measured else "none"
    given = {"keep": keep, "mixer": options.mixer, "context": options.context, "profile": profile}
    made = ConvertOptions(**{name: value for name, value in given.items() if value is not None})
    source = resolve_source(teacher, out.parent / f".{out.name}.teacher", None, options.revision)
    with removed_unless_unfinished(source, out):
        opened = open_teacher(source)
        table = with_defaults(made, opened).table(opened.num_layers, (), opened.config)
        task = plan_selection(opened, options, table)
        return run_selection(task, out, show, overwrite=options.overwrite), task


@contextmanager
def removed_unless_unfinished(source: Source, out: Path) -> Iterator[None]:
    """Removes the copy of a GGUF teacher at the end, unless an unfinished selection can continue with it."""
    from .journal import SelectionJournal

    try:
        yield
    finally:
        if source.gguf and not SelectionJournal.path_of(out).exists():
            shutil.rmtree(source.folder, ignore_errors=True)
