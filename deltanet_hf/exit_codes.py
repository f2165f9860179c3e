"""What every command of the project ends with: 0, 1 a check failed, 2 something the user can put right, 130 stopped."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from deltanet_hf.errors import QualityError, UserError


def run_command(command: Callable[[], object]) -> None:
    """Call a command; what it raises becomes one line and the exit code."""
    try:
        command()
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except QualityError as error:
        typer.echo(f"failed: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
