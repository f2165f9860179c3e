"""Selections with tiny teachers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deltanet_convert.options import ConvertOptions
from deltanet_convert.select.run import run_selection
from deltanet_convert.select.select_options import SelectOptions
from deltanet_convert.select.selection_file import Selection
from deltanet_convert.select.task import SelectionTask, plan_selection
from support.tiny_conversion import opened


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


QUICK: dict[str, Any] = {"method": "forward", "window": 6, "sinks": 1, "length": 400, "probes": 1}


def tiny_task(
    teacher: Path, keep: str = "1", mixer: str = "window", cache_bits: Any = 4, **options: Any
) -> SelectionTask:
    """Plans a selection with short probes."""
    found = opened(teacher)
    chosen = SelectOptions(keep=keep, **{**QUICK, **options})
    made = ConvertOptions(mixer=mixer, cache_bits=cache_bits, context=chosen.context)
    table = made.table(found.num_layers, (), found.config)
    return plan_selection(found, chosen, table)


def tiny_selection(
    teacher: Path, out: Path, keep: str = "1", mixer: str = "window", overwrite: bool = False, **options: Any
) -> Selection:
    """Runs a selection with short probes."""
    return run_selection(tiny_task(teacher, keep, mixer, **options), out, overwrite=overwrite)
