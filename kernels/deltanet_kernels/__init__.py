"""Operators of Gated DeltaNet: PyTorch on CPU, Triton on CUDA. The first one that is used imports torch and triton."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from deltanet_kernels.installed_versions import require

if TYPE_CHECKING:
    from deltanet_kernels.exports import *  # noqa: F403

require("torch", "triton")  # before their first import, which an old version may break in its own way


def __getattr__(name: str) -> Any:
    # A module of the package may ask for another one while the exports, which need both, are being imported.
    if importlib.util.find_spec(f"{__name__}.{name}") is None:
        exports = importlib.import_module("deltanet_kernels.exports")
        if name == "__all__" or name in exports.__all__:
            return getattr(exports, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__getattr__("__all__")]
