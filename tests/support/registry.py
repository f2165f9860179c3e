"""Which mixers the tests over all rows of `MIXERS` take by default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from transformers import PreTrainedModel

from deltanet_hf.mixers import MIXERS
from support.tiny_models import HYBRID, mixed_mixture_table, mixture_table, tiny_mixture, tiny_student

IN_FULL = ("gated_deltanet", "window", "mixed_heads")
"""The default mixer, and the kinds that stand beside it in one model."""


def rows(names: Iterable[str] = MIXERS, *, all_by_default: bool = True) -> list[Any]:
    """The mixers `names` as parameters of a test; unless `all_by_default`, those that are not in `IN_FULL` are slow."""
    quick = set(names) if all_by_default else set(IN_FULL)
    return [pytest.param(name, id=name, marks=() if name in quick else pytest.mark.slow) for name in names]


def made(name: str) -> PreTrainedModel:
    """A tiny model of this mixer beside softmax layers, or of another name of the tests of caches."""
    if name == "mixed_heads":
        return tiny_mixture("llama", mixed_mixture_table())
    if name == "sliding":
        return tiny_mixture("gemma3_text", mixture_table())
    return tiny_student("llama", layers=HYBRID, mixer=name)
