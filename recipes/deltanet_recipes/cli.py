"""The console script `deltanet-hf`.

A subcommand's module is imported only when that subcommand is called, so that `deltanet-hf --help` imports neither
torch nor transformers. Exit codes are those of `deltanet_hf.exit_codes`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import typer

from deltanet_recipes.cpu_threads import settle_threads
from deltanet_recipes.log_bars import hide_bars_in_logs


@dataclass(frozen=True)
class Subcommand:
    """The module and function of a subcommand, its line in the help, and its Click context settings."""

    module: str
    function: str
    help: str
    context: dict[str, Any] = field(default_factory=dict)

    def load(self) -> Callable[..., Any]:
        return getattr(importlib.import_module(self.module), self.function)


UNKNOWN_ALLOWED = {"allow_extra_args": True, "ignore_unknown_options": True}
COMMANDS = {
    "convert": Subcommand(
        "deltanet_convert.convert_command",
        "convert_command",
        "Convert a pretrained softmax model: some heads or layers see all tokens, the others a window or a state.\n\n"
        "Example: `deltanet-hf convert HuggingFaceTB/SmolLM2-135M-Instruct student`",
    ),
    "import": Subcommand(
        "deltanet_convert.export.import_command",
        "import_command",
        "Import a Qwen3.5 text model, whose layers are Gated DeltaNet already, or take an export back.\n\n"
        "Example: `deltanet-hf import served student`",
    ),
    "select": Subcommand(
        "deltanet_convert.select.command",
        "select_command",
        "Choose the layers or key/value heads that stay softmax, by what the model needs to find facts again.\n\n"
        "Example: `deltanet-hf select HuggingFaceTB/SmolLM2-135M-Instruct --unit kv_head --keep 10%`",
    ),
    "recipes": Subcommand(
        "deltanet_recipes.shipped",
        "recipes_command",
        "List the training recipes that are installed, or print one.",
    ),
    "data": Subcommand(
        "deltanet_recipes.command",
        "data",
        "Tokenise the text of a recipe, without documents that overlap with evaluation texts.\n\n"
        "Example: `deltanet-hf data smollm2-135m-heads-10m student=smol`",
    ),
    "align": Subcommand(
        "deltanet_recipes.command",
        "align",
        "Train each converted layer to reproduce its teacher's attention output: the align stage of a recipe.\n\n"
        "Example: `deltanet-hf align smollm2-135m-hybrid-10m student=smol`",
    ),
    "distill": Subcommand(
        "deltanet_recipes.command",
        "distill",
        "Run all training stages of a recipe. After an interruption, the same command continues the run.\n\n"
        "Example: `deltanet-hf distill smollm2-135m-heads-10m student=smol output=runs/b`",
    ),
    "eval": Subcommand(
        "deltanet_recipes.evaluation_command",
        "evaluate",
        "Score a model with lm-eval, which gets all options that are not listed here.\n\n"
        "Example: `deltanet-hf eval student --tasks arc_easy,sciq --limit 200`",
        UNKNOWN_ALLOWED,
    ),
    "report": Subcommand(
        "deltanet_recipes.evaluation_command",
        "report",
        "Compare a teacher, its students and untrained baselines. After an interruption, the same command measures the "
        "models that are missing.\n\n"
        "Example: `deltanet-hf report HuggingFaceTB/SmolLM2-135M-Instruct student --out report`",
    ),
    "export": Subcommand(
        "deltanet_convert.export.export_command",
        "export_command",
        "Export a model that was converted with --profile qwen3_5 for vLLM, mlx-lm or llama.cpp.\n\n"
        "Example: `deltanet-hf export student student.gguf --format gguf`",
    ),
    "generate": Subcommand(
        "deltanet_hf.generate",
        "generate_command",
        "Generate text that continues a prompt, or the answer to a message.\n\n"
        'Example: `deltanet-hf generate student --prompt "What is photosynthesis?"`',
    ),
    "bench": Subcommand(
        "deltanet_hf.evaluation.speed.command",
        "bench_command",
        "Measure prefill, decoding and memory of a model and its teacher.\n\n"
        "Example: `deltanet-hf bench student --teacher HuggingFaceTB/SmolLM2-135M-Instruct --context 2048 --batch 1`",
    ),
}


def build_app(chosen: str | None) -> typer.Typer:
    """The Typer application; only the module of the subcommand `chosen` is imported, none for None."""
    app = typer.Typer(
        name="deltanet-hf",
        help="Convert a pretrained softmax language model into one with a small cache; train, evaluate and run it.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
    )
    for name, command in COMMANDS.items():
        function = command.load() if name == chosen else _not_imported
        app.command(name, help=command.help, context_settings=command.context)(function)
    return app


def _not_imported() -> None:
    """Placeholder function of a subcommand that was not called."""


def main() -> None:
    """Run the subcommand that the process's arguments name."""
    settle_threads()
    hide_bars_in_logs()
    chosen = next((argument for argument in sys.argv[1:] if argument in COMMANDS), None)
    if chosen is not None and sys.stderr.isatty():
        typer.echo("Loading PyTorch and transformers ...", err=True)  # can take half a minute on a slow disk
    try:
        build_app(chosen)()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        try:
            from deltanet_hf.exit_codes import exit_with  # imports torch and transformers; `--help` does not need them
        except ImportError as unusable:  # one of the two is missing or too old
            typer.echo(f"error: {unusable}", err=True)
            sys.exit(2)
        exit_with(error)
        raise


if __name__ == "__main__":
    main()
