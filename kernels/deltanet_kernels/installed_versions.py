"""The check of the versions of installed packages. It reads their metadata and imports none of them.

pip keeps the bounds of pyproject.toml only while it installs this project; later another package may replace one.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

# The bounds of pyproject.toml, by the names that packages have there: the oldest version, the first that is too new.
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
TOO_NEW = {"transformers": "5.24"}  # there, attention takes its cache by another name


class UnsupportedVersionError(ImportError):
    """This project cannot use the installed version of a package. The message names the versions and the remedy."""


def require(*packages: str) -> None:
    """Compare installed packages with the bounds; one that is not installed passes, and its import will fail by itself.

    Args:
        packages: keys of `OLDEST`.

    Raises:
        UnsupportedVersionError: one of them is too old or too new. Builds (2.11.0+cpu) and candidates (2.11.0rc1)
            count as their release.
    """
    for package in packages:
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue
        release, oldest, too_new = _release(installed or ""), OLDEST[package], TOO_NEW.get(package)
        if release and (release < _release(oldest) or (too_new is not None and release >= _release(too_new))):
            below, bound = ("", "") if too_new is None else (f", below {too_new}", f",<{too_new}")
            raise UnsupportedVersionError(
                f"deltanet-hf needs {package} {oldest} or later{below}, and {installed} is installed: run "
                f"`pip install --upgrade '{package}>={oldest}{bound}'`"
            )


def _release(text: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version: (2, 11, 0) of "2.11.0+cpu"; () if there are none."""
    found = re.match(r"\d+(\.\d+)*", text)
    return () if found is None else tuple(int(part) for part in found[0].split("."))
