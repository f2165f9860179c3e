"""Exit codes of every command: 0 success, 1 failed check, 2 mistake that the user can correct, 130 interrupted."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from deltanet_hf.errors import QualityError, UserError
from deltanet_hf.version import install_command
from deltanet_kernels.installed_versions import TooOldError

# Optional packages by top-level module, and the extra of deltanet-hf that installs each.
EXTRAS = {
    "accelerate": "train",
    "datasets": "train",
    "gguf": "gguf",
    "lm_eval": "eval",
    "peft": "train",
    "pyarrow": "train",
}


def run_command(command: Callable[[], object]) -> None:
    """Call `command`. An expected exception is printed as one line, and the process exits with its code."""
    try:
        command()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        exit_with(error)
        raise


def exit_with(error: Exception) -> None:
    """Print an expected exception as one line and exit with its code; return if the exception is unexpected.

    Expected are `UserError`, `QualityError`, a package that is too old, and the absence of one that an extra installs.
    """
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        if package in EXTRAS:
            error = UserError(f"{package} is not installed; run {install_command(EXTRAS[package])}")
    if isinstance(error, UserError | TooOldError):
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    if isinstance(error, QualityError):
        typer.echo(f"failed: {error}", err=True)
        sys.exit(1)
