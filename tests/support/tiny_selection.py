"""Selections with tiny teachers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deltanet_convert.options import ConvertOptions
from deltanet_convert.select.run import run_selection
from deltanet_convert.select.select_options import SelectOptions
from deltanet_convert.select.selection_file import Selection
from deltanet_convert.select.task import SelectionTask, plan_selection
from support.tiny_conversion import opened
from support.tiny_models import LAYERS


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


def selection_file(folder: Path, **keys: Any) -> str:
    """Writes a selection for a tiny Llama, by default of heads, with these keys as they are in the file."""
    facts: dict[str, Any] = {"teacher": "tiny", "model_type": "llama", "method": "forward", "budget": "4", "seed": 0}
    facts |= {"num_hidden_layers": LAYERS, "num_key_value_heads": 2, "unit": "kv_head", "scores": {}, "settings": {}}
    made = Selection(**facts, kept=(), order=(), planned_windows=keys.get("planned_windows"))
    file = folder / "selection.json"
    file.write_text(json.dumps(made.to_json() | {"order": keys.get("kept", ())} | keys))
    return str(file)
