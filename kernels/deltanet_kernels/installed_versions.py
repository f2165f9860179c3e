"""The check that installed packages are not too old. It reads their metadata and imports none of them.

pip keeps the bounds of pyproject.toml only while it installs this project; later another package may replace one.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

# The bounds of pyproject.toml, by the names that packages have there.
OLDEST = {
    "accelerate": "1.10",
    "datasets": "4.0",
    "gguf": "0.17",
    "lm-eval": "0.4.13",
    "peft": "0.18",
    "torch": "2.11",
    "transformers": "5.17",
    "triton": "3.6",
}


class TooOldError(ImportError):
    """An installed package is older than this project can use. The message names both versions and the remedy."""


def require(*packages: str) -> None:
    """Compare installed packages with `OLDEST`; one that is not installed passes, and its import will fail by itself.

    Args:
        packages: keys of `OLDEST`.

    Raises:
        TooOldError: one of them is too old. Builds (2.11.0+cpu) and candidates (2.11.0rc1) count as their release.
    """
    for package in packages:
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue
        oldest = OLDEST[package]
        if installed and () < _release(installed) < _release(oldest):
            raise TooOldError(
                f"deltanet-hf needs {package} {oldest} or later, and {installed} is installed: run "
                f"`pip install --upgrade '{package}>={oldest}'`"
            )


def _release(text: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version: (2, 11, 0) of "2.11.0+cpu"; () if there are none."""
    found = re.match(r"\d+(\.\d+)*", text)
    return () if found is None else tuple(int(part) for part in found[0].split("."))
