"""`deltanet-hf demo FOLDER`; what it needs is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder for the models, report.md and the plot.")],
) -> None:
    """Convert, ask and measure a real model on a CPU. A conversion that exists already is not run again."""
    from deltanet_recipes.demo.run import run_demo

    run_demo(folder)
