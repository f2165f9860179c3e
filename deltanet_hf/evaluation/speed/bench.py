"""Measures models one after the other, over context lengths and batch sizes."""

from __future__ import annotations

import gc
import json
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from deltanet_hf.errors import QualityError, UserError
from deltanet_hf.evaluation.measures.decoding_mode import MODES, Mode
from deltanet_hf.evaluation.measures.speed import DECODED, measure_speed
from deltanet_hf.evaluation.speed.check_decoding import check_decoding
from deltanet_hf.safe_write import write_atomically

Row = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A model to measure: its shape and kind, as rows name them, and how it is loaded.

    With `only`, it is measured in this mode, whatever the conditions say.
    """

    shape: str
    kind: str
    load: Callable[[], PreTrainedModel]
    only: str | None = None


@dataclass(frozen=True)
class Conditions:
    """At which context lengths (tokens), batch sizes and modes each model is measured, and from how many repeats."""

    contexts: Sequence[int]
    batches: Sequence[int]
    modes: Sequence[str]
    repeats: int


def measure(subjects: Iterable[Subject], conditions: Conditions, say: Callable[[str], None]) -> list[Row]:
    """The rows of all models; `say` receives lines of progress.

    What does not fit in memory, and modes that cannot be had on the device or that decode other tokens than a complete
    forward pass, have no rows.
    """
    rows: list[Row] = []
    for subject in subjects:
        model = subject.load()
        for mode in conditions.modes if subject.only is None else [subject.only]:
            name = f"{subject.shape} {subject.kind}, {mode}"
            try:
                worst = check_decoding(model, MODES[mode], length=min(300, max(conditions.contexts)))
            except (QualityError, UserError) as error:
                say(f"{name}: not measured: {error}")
                continue
            say(f"{name}: greedy tokens are right (rounding: {worst:.3f})")
            for batch in conditions.batches:
                for context in conditions.contexts:
                    row = _row(subject, model, mode, batch, context, conditions.repeats)
                    if row is None:
                        say(f"{name}, {batch} x {context}: out of memory")
                    else:
                        rows.append(row)
        del model
        gc.collect()  # modules refer to each other
    return rows


def _row(subject: Subject, model: PreTrainedModel, mode: str, batch: int, context: int, repeats: int) -> Row | None:
    try:
        found = figures(model, MODES[mode], batch, context, repeats)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        torch.cuda.empty_cache()
        return None
    return {"shape": subject.shape, "kind": subject.kind, "mode": mode, "batch": batch, "context": context, **found}


def figures(model: PreTrainedModel, mode: Mode, batch: int, context: int, repeats: int, steps: int = DECODED) -> Row:
    """Prompt tokens per second of all sequences, ms per step of the batch, MB after the prompt."""
    point = measure_speed(model, context, batch, repeats, mode, steps)
    return {
        "prefill_tokens_per_s": round(point.prefill_tokens_per_second, 1),
        "decode_ms": round(1000 * batch / point.decode_tokens_per_second, 4),
        "cache_mb": round(point.cache_bytes / 1e6, 3),
    }


def write_rows(path: Path, rows: Sequence[Row], device: torch.device, facts: dict[str, Any]) -> None:
    """Write the rows with the machine, the command and `facts` as JSON: a line per row."""
    head = json.dumps({"machine": machine(device), "command": command(), **facts}, indent=1)[:-2]
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    write_atomically(path, f'{head},\n "rows": [\n  {lines}\n ]\n}}\n'.encode())


def machine(device: torch.device) -> dict[str, str]:
    """The name of the device and the versions that times depend on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"device": name, "python": platform.python_version(), **versions}


def command() -> str:
    """The command line of this process."""
    return shlex.join(["deltanet-hf", *sys.argv[1:]])
