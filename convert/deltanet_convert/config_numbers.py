"""Checks the numbers of a teacher's config that would otherwise end, layers later, in values that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from deltanet_hf.errors import UserError

SHORTEST = 2  # positions: a sequence has at least one token that is predicted from another


def check_numbers(file: Path, raw: dict[str, Any], config: PreTrainedConfig) -> None:
    """Raises UserError for a number that is not finite or that no model can compute with.

    Args:
        file: config.json.
        raw: its contents.
        config: what transformers made of them.
    """
    for key, value in _numbers(raw):
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{file}: key '{key}' is {value}; correct it")
    eps = getattr(config, "rms_norm_eps", 0.0)
    if not 0 <= eps < 1:
        raise UserError(f"{file}: key 'rms_norm_eps' is {eps}, expected a number from 0 to 1, such as 1e-6")
    longest = getattr(config, "max_position_embeddings", SHORTEST)
    if longest < SHORTEST:
        raise UserError(f"{file}: key 'max_position_embeddings' is {longest}, expected at least {SHORTEST}")
    for key, value in _numbers(getattr(config, "rope_parameters", None) or {}):
        if key.rpartition(".")[2] in ("rope_theta", "factor") and value <= 0:
            raise UserError(f"{file}: key '{key}' of the rotary embedding is {value}, expected a number above 0")


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a JSON value, with its key; nested keys are separated by dots."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, key)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield key, value
