"""Rewrites the generated tables of Markdown files: `python tools/readme_tables.py README.md ...`.

A table is the text between `<!-- KIND: FILE ... -->` and `<!-- end of KIND -->`; what follows FILE is a note for the
reader. A kind is a function of the file (`KINDS`), which tells what the file is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

import chips_table
import command_table
import comparison_tables
import recipe_keys
from context_table import context
from data_table import data
from deltanet_hf.exit_codes import run_command
from gpu_tests import gpu
from kernels_table import kernels
from measuring.lab import table as lab_table
from measuring.rows import RowFile
from rules_table import rules
from speed_table import recommended, speed
from training_table import training
from vllm_table import served, vllm

KINDS: dict[str, Callable[[Path], str]] = {
    "front": comparison_tables.front,
    "changes": comparison_tables.changes,
    "rules": rules,
    "lab": lambda path: lab_table.table(RowFile(path).rows()),
    "speed": speed,
    "recommended": recommended,
    "kernels": kernels,
    "training": training,
    "vllm": vllm,
    "served": served,
    "context": context,
    "data": data,
    "gpu": gpu,
    # Not of a file but of the code.
    "keys": lambda _: recipe_keys.keys(),
    "cli": lambda _: command_table.commands(),
    "chips": lambda _: chips_table.kernels(),
    "sizes": lambda _: chips_table.sizes(),
}
BLOCK = re.compile(rf"(<!-- ({'|'.join(KINDS)}): (\S+)[^\n]*-->\n)(.*?)(<!-- end of \2 -->)", re.DOTALL)


def rewritten(text: str, root: Path) -> str:
    """`text` with all generated tables made anew from their files, whose paths are relative to `root`."""

    def block(match: re.Match[str]) -> str:
        opening, kind, file, _, closing = match.groups()
        made = KINDS[kind](root / file)
        return f"{opening}{made}\n{closing}" if made else f"{opening}{closing}"

    return BLOCK.sub(block, text)


def main(
    files: Annotated[list[Path], typer.Argument(help="Markdown files; paths in them are relative to here.")],
) -> None:
    """Rewrite the generated tables of Markdown files."""
    for file in files:
        file.write_text(rewritten(file.read_text(encoding="utf-8"), Path()), encoding="utf-8")


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
