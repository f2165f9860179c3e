"""Which mixers the tests over all rows of `MIXERS` take by default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from deltanet_hf.mixers import MIXERS

IN_FULL = ("gated_deltanet", "window", "mixed_heads")
"""The default mixer, and the kinds that stand beside it in one model."""


def rows(names: Iterable[str] = MIXERS, *, all_by_default: bool = True) -> list[Any]:
    """The mixers `names` as parameters of a test; unless `all_by_default`, those that are not in `IN_FULL` are slow."""
    quick = set(names) if all_by_default else set(IN_FULL)
    return [pytest.param(name, id=name, marks=() if name in quick else pytest.mark.slow) for name in names]
