"""The console script `deltanet-hf`.

A subcommand's module is imported only when that subcommand is called, and torch and transformers only when it runs, so
that no help imports them. Exit codes are those of `deltanet_hf.exit_codes`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import typer

from deltanet_recipes.cpu_threads import settle_threads
from deltanet_recipes.log_bars import hide_bars_in_logs


@dataclass(frozen=True)
class Subcommand:
    """The panel of the help, module, function and help text of a subcommand, and its Click context settings.

    A subcommand without a panel is another spelling of one that has one; the help does not list it.
    """

    panel: str | None
    module: str
    function: str
    help: str
    context: dict[str, Any] = field(default_factory=dict)

    def load(self) -> Callable[..., Any]:
        return getattr(importlib.import_module(self.module), self.function)


UNKNOWN_ALLOWED = {"allow_extra_args": True, "ignore_unknown_options": True}
KEYS = (
    "Keys that most runs set: `student`, `output`, `data.sources`, `stages.STAGE.tokens`, "
    "`stages.STAGE.micro_batch_rows`, `engine.sharding`; docs/recipe-keys.md has all.\n\n"
)
OWN_TEXT = "'data.decontaminate=[]' 'data.sources=[{path: corpus.jsonl}]'"
COMMANDS = {
    "convert": Subcommand(
        "Convert",
        "deltanet_convert.convert_command",
        "convert_command",
        "Convert a pretrained softmax model: some heads or layers keep softmax attention to all tokens, the others get "
        "Gated DeltaNet, a window, or both.\n\n"
        "Example: `deltanet-hf convert HuggingFaceTB/SmolLM2-135M-Instruct student`",
    ),
    "select": Subcommand(
        "Convert",
        "deltanet_convert.select.command",
        "select_command",
        "Choose which layers or key/value heads keep full attention, by how much each helps long-range recall.\n\n"
        "Example: `deltanet-hf select HuggingFaceTB/SmolLM2-135M-Instruct --unit kv_head --keep 10%`",
    ),
    "export": Subcommand(
        "Convert",
        "deltanet_convert.export.export_command",
        "export_command",
        "Export a model that was converted with --profile qwen3_5 for vLLM, mlx-lm or llama.cpp.\n\n"
        "Example: `deltanet-hf export student student.gguf --format gguf`",
    ),
    "import": Subcommand(
        "Convert",
        "deltanet_convert.export.import_command",
        "import_command",
        "Import a Qwen3.5 text model, whose layers are Gated DeltaNet already, or take an export back.\n\n"
        "Example: `deltanet-hf import served student`",
    ),
    "recipes": Subcommand(
        "Train",
        "deltanet_recipes.shipped",
        "recipes_command",
        "List the training recipes that are installed, or print one.",
    ),
    "data": Subcommand(
        "Train",
        "deltanet_recipes.command",
        "data",
        f"Tokenise the text of a recipe, without documents that overlap with evaluation texts.\n\n{KEYS}"
        f"Example: `deltanet-hf data smollm2-135m student=student {OWN_TEXT}`",
    ),
    "align": Subcommand(
        "Train",
        "deltanet_recipes.command",
        "align",
        "Train each converted layer to reproduce its teacher's attention output: the align stage of a recipe.\n\n"
        f"{KEYS}Example: `deltanet-hf align smollm2-135m student=student {OWN_TEXT}`",
    ),
    "distill": Subcommand(
        "Train",
        "deltanet_recipes.command",
        "distill",
        "Run all training stages of a recipe. After an interruption, the same command continues the run.\n\n"
        f"{KEYS}Example: `deltanet-hf distill smollm2-135m student=student output=run {OWN_TEXT}`",
    ),
    "report": Subcommand(
        "Measure",
        "deltanet_recipes.evaluation_command",
        "report",
        "Compare a teacher, its students and training-free baselines. After an interruption, the same command measures "
        "the models that are missing.\n\n"
        "Example: `deltanet-hf report HuggingFaceTB/SmolLM2-135M-Instruct student --out report`",
    ),
    "eval": Subcommand(
        "Measure",
        "deltanet_recipes.evaluation_command",
        "evaluate",
        "Score a model with lm-eval, which gets all options that are not listed here.\n\n"
        "Example: `deltanet-hf eval student --tasks arc_easy,sciq --limit 200`",
        UNKNOWN_ALLOWED,
    ),
    "bench": Subcommand(
        "Measure",
        "deltanet_hf.evaluation.speed.command",
        "bench_command",
        "Measure prefill, decoding and memory of a model and its teacher.\n\n"
        "Example: `deltanet-hf bench student --teacher HuggingFaceTB/SmolLM2-135M-Instruct --context 2k --batch 1`",
    ),
    "generate": Subcommand(
        "Run",
        "deltanet_hf.generate",
        "generate_command",
        "Generate text that continues a prompt, or the answer to a message.\n\n"
        'Example: `deltanet-hf generate student --prompt "What is photosynthesis?"`',
    ),
    "demo": Subcommand(
        "Run",
        "deltanet_recipes.demo.command",
        "demo_command",
        "Convert, ask and measure SmolLM2-135M-Instruct on a CPU, and write a report: about four minutes.\n\n"
        "Example: `deltanet-hf demo demo`",
    ),
}
COMMANDS["distil"] = replace(COMMANDS["distill"], panel=None)


def build_app(chosen: str | None) -> typer.Typer:
    """The Typer application; only the module of the subcommand `chosen` is imported, none for None."""
    app = typer.Typer(
        name="deltanet-hf",
        help="Convert a pretrained softmax language model into a hybrid with Gated DeltaNet or windows and a small "
        "cache; train, evaluate and run it.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
    )
    app.callback()(_root)
    for name, command in COMMANDS.items():
        function = command.load() if name == chosen else _not_imported
        shown = {"rich_help_panel": command.panel} if command.panel else {"hidden": True}
        app.command(name, help=command.help, context_settings=command.context, **shown)(function)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        from deltanet_hf.version import __version__

        typer.echo(f"deltanet-hf {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The options of the application itself."""


def _not_imported() -> None:
    """Placeholder function of a subcommand that was not called."""


def main() -> None:
    """Run the subcommand that the process's arguments name."""
    settle_threads()
    hide_bars_in_logs()
    chosen = next((argument for argument in sys.argv[1:] if argument in COMMANDS), None)
    if chosen is not None and "--help" not in sys.argv and sys.stderr.isatty():
        typer.echo("Loading PyTorch and transformers ...", err=True)  # can take half a minute on a slow disk
    try:
        build_app(chosen)()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        try:
            from deltanet_hf.exit_codes import exit_with
        except ImportError as unusable:  # torch or transformers is too old
            typer.echo(f"error: {unusable}", err=True)
            sys.exit(2)
        exit_with(error)
        raise


if __name__ == "__main__":
    main()
