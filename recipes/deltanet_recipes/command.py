"""`deltanet-hf align RECIPE` and `deltanet-hf distill RECIPE`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipeArgument = Annotated[Path, typer.Argument(help="YAML file; recipes/README.md explains every key.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="key=value, dotted, parsed as YAML: stages.distil.tokens=1000000 output=runs/b"),
]


def align(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """Run a recipe's align stages: each converted layer learns its teacher's attention output."""
    _run(recipe, overrides, ("align",))


def distill(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """Run all stages of a recipe; called again after an interruption, it continues where it was."""
    _run(recipe, overrides, None)


def _run(recipe: Path, overrides: list[str] | None, kinds: tuple[str, ...] | None) -> None:
    from deltanet_recipes.config import load_recipe

    settings = load_recipe(recipe, overrides or ())
    from deltanet_recipes.pipeline import run

    run(settings, kinds)
