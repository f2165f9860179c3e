"""The command line as Markdown, from the definitions that make `--help`."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import typer

from deltanet_recipes.cli import COMMANDS, build_app
from measuring.markdown import Column, table


def commands() -> str:
    """All commands by panel, in the order of the help: what each does, and a table of its arguments and options."""
    listed = [(name, command.panel) for name, command in COMMANDS.items() if command.panel]
    panels = groupby(listed, key=lambda entry: entry[1])
    return "\n\n".join(
        "\n\n".join([f"## {panel}", *(_command(name) for name, _ in entries)]) for panel, entries in panels
    )


def _command(name: str) -> str:
    command: Any = typer.main.get_command(build_app(name))
    columns = [Column("", _name), Column("default", _default), Column("meaning", _meaning)]
    shown = [parameter for parameter in command.commands[name].params if not getattr(parameter, "hidden", False)]
    return f"### deltanet-hf {name}\n\n{COMMANDS[name].help}\n\n{table(columns, shown)}"


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar}`"
    return f"`{' '.join([parameter.opts[0], *filter(None, [parameter.metavar])])}`"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    if getattr(parameter, "is_flag", False):
        return "off"
    return "-" if parameter.default is None or not parameter.show_default else str(parameter.default)


def _meaning(parameter: Any) -> str:
    return parameter.help.replace("|", "\\|")
