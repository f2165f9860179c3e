"""The cache among the arguments and outputs of transformers' modules: `past_key_values`, from 5.24 on `cache`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.modeling_outputs import CausalLMOutputWithPast

NAMES = ("cache", "past_key_values")
CACHE = next(name for name in NAMES if name in CausalLMOutputWithPast.__dataclass_fields__)
"""Its name in the installed transformers."""


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among the keyword arguments of a call, which callers give either name; None if there is none."""
    return next((arguments[name] for name in NAMES if arguments.get(name) is not None), None)


def given_cache(past_key_values: Any, further: dict[str, Any]) -> Any:
    """The cache of a layer's call: `past_key_values`, or `cache`, which is taken out of its further arguments."""
    cache = further.pop("cache", None)
    return past_key_values if cache is None else cache
