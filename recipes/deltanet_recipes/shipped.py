"""The recipes that are installed with the package, and `deltanet-hf recipes`, which lists and copies them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from deltanet_hf.errors import UserError, did_you_mean

FOLDER = Path(__file__).parent / "yaml"


def shipped_recipes() -> dict[str, Path]:
    """The YAML file of each shipped recipe, by its name, in alphabetical order."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def recipe_path(recipe: str | Path) -> Path:
    """The file that a recipe argument stands for: the file of that path if there is one, else the shipped recipe.

    Raises UserError with the names of the shipped recipes if it is neither.
    """
    path = Path(recipe)
    if path.is_file():
        return path
    shipped = shipped_recipes()
    if str(recipe) not in shipped:
        known = f"give the path of a YAML file, or one of {', '.join(shipped)}"
        raise UserError(f"{recipe}: no such recipe{did_you_mean(str(recipe), shipped)}; {known}")
    return shipped[str(recipe)]


def recipes_command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Shipped recipe to print; without it, all are listed.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to copy the recipe to, instead of printing it.")] = None,
) -> None:
    """List the recipes that are installed with the package, print one, or copy it to edit it."""
    shipped = shipped_recipes()
    if name is None:
        if out is not None:
            raise UserError("--out: give the name of the recipe to copy, too")
        _list(shipped)
        return
    if name not in shipped:
        meant = did_you_mean(name, shipped)
        raise UserError(f"{name}: no shipped recipe has this name{meant}; there are {', '.join(shipped)}")
    if out is None:
        typer.echo(shipped[name].read_text(encoding="utf-8"), nl=False)
        return
    if out.exists():
        raise UserError(f"{out}: exists already; choose another file with --out")
    try:
        shutil.copyfile(shipped[name], out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}); choose another file with --out") from None
    typer.echo(f"{out}: copied; edit it and run it with `deltanet-hf distill {out}`")


def _list(shipped: dict[str, Path]) -> None:
    """Print each recipe with its purpose: in two columns on a terminal, else a line each."""
    console, width = Console(), max(map(len, shipped))
    table = Table.grid(padding=(0, 2))
    for label, path in shipped.items():
        table.add_row(label, _purpose(path))
        if not console.is_terminal:
            typer.echo(f"{label:{width}}  {_purpose(path)}")
    if console.is_terminal:
        console.print(table)
    typer.echo(
        "Copy one: deltanet-hf recipes NAME --out FILE. Run one: deltanet-hf distill NAME student=FOLDER\n"
        "To begin: smollm2-135m, whose first lines have the commands.",
        err=True,
    )


def _purpose(path: Path) -> str:
    """The first comment line of a recipe, which says what it is for."""
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()
