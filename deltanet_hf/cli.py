"""`deltanet-hf`: one command line. A subcommand's package is imported only when the subcommand is called.

Exit codes: 0 done; 1 a check of the result failed; 2 something the user can put right; 130 interrupted.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import typer

from deltanet_hf.exit_codes import run_command


@dataclass(frozen=True)
class Subcommand:
    """Where a subcommand lives, and its line in the help."""

    module: str
    function: str
    help: str
    context: dict[str, Any] = field(default_factory=dict)

    def load(self) -> Callable[..., Any]:
        return getattr(importlib.import_module(self.module), self.function)


PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
COMMANDS = {
    "convert": Subcommand(
        "deltanet_convert.convert_command", "convert_command", "Turn a softmax model into a Gated DeltaNet model."
    ),
    "align": Subcommand("deltanet_recipes.command", "align", "Match each converted layer to its teacher's attention."),
    "distill": Subcommand("deltanet_recipes.command", "distill", "Run every stage of a recipe."),
    "eval": Subcommand(
        "deltanet_hf.evaluation.command", "evaluate", "Score a model with lm-eval; takes lm-eval's arguments.", PASS_ON
    ),
    "report": Subcommand(
        "deltanet_hf.evaluation.command", "report", "Compare a teacher, its students and untrained baselines."
    ),
    "export": Subcommand(
        "deltanet_convert.export.export_command", "export_command", "Write a native model for vLLM, mlx-lm, llama.cpp."
    ),
    "generate": Subcommand("deltanet_hf.generate", "generate_command", "Continue a prompt, token by token."),
}


def build_app(chosen: str | None) -> typer.Typer:
    """The application, with only the chosen subcommand imported."""
    app = typer.Typer(
        name="deltanet-hf",
        help="Turn a pretrained softmax language model into a Gated DeltaNet model, train it, score it, use it.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
    )
    for name, command in COMMANDS.items():
        function = command.load() if name == chosen else _not_chosen
        app.command(name, help=command.help, context_settings=command.context)(function)
    return app


def _not_chosen() -> None:
    """Stands in the help for a subcommand that was not called."""


def main() -> None:
    """Entry point of the console script."""
    chosen = next((argument for argument in sys.argv[1:] if argument in COMMANDS), None)
    run_command(build_app(chosen))


if __name__ == "__main__":
    main()
