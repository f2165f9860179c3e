"""The commands `deltanet-hf data`, `align` and `distill`, which prepare and run a recipe."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

RecipeArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE", help="YAML file, or the name of a shipped recipe (`deltanet-hf recipes` lists them)."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Values that replace those of the recipe: stages.long.tokens=1000000 output=runs/b",
    ),
]


def data(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """Tokenise the data of a recipe, which its run then finds, and write its evaluation arrays."""
    from deltanet_recipes.config import load_recipe

    settings = load_recipe(recipe, overrides or ())
    from deltanet_recipes.data.prepare import prepare_corpora
    from deltanet_recipes.training.model_pair import load_tokenizer
    from deltanet_recipes.training.pipeline import report_data

    corpora = prepare_corpora(settings, load_tokenizer(settings.student), typer.echo)
    typer.echo(f"counts: {report_data(Path(settings.output), [corpus.report for corpus in corpora])}")


def align(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """Run the align stages of a recipe, in which each converted layer learns its teacher's attention output."""
    _run(recipe, overrides, ("align",))


def distill(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what is trained, memory and time of each stage, and stop.")
    ] = False,
) -> None:
    """Run all stages of a recipe. After an interruption, the same command continues the run."""
    if dry_run:
        from deltanet_recipes.config import load_recipe
        from deltanet_recipes.training.pipeline import show_run

        show_run(load_recipe(recipe, overrides or ()))
        return
    _run(recipe, overrides, None)


def _run(recipe: Path, overrides: list[str] | None, kinds: tuple[str, ...] | None) -> None:
    try:
        from deltanet_recipes.config import load_recipe

        settings = load_recipe(recipe, overrides or ())
        from deltanet_recipes.training.pipeline import run

        run(settings, kinds)
    except KeyboardInterrupt as interrupt:
        command = shlex.join(["deltanet-hf", "align" if kinds else "distill", str(recipe), *(overrides or ())])
        typer.echo(f"{interrupt or 'interrupted'}; go on with: {command}", err=True)
        raise typer.Exit(130) from None
