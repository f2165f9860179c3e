"""What the folder of a model says of its making, and the model itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from deltanet_hf.loading import load_model
from deltanet_recipes.training.model_pair import place


def load_for_measure(folder: str, device: torch.device) -> nn.Module:
    """Load a teacher or student in eval mode, in bfloat16 on a GPU and float32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return place(load_model(folder, Path(folder), dtype, attn_implementation="sdpa"), device)


def changed_settings(folder: Path) -> dict[str, Any]:
    """The settings of a model's mixer that are not the recommended ones; empty for a model that was not converted."""
    path = folder / "conversion.json"
    report = json.loads(path.read_text()) if path.is_file() else {}
    return report.get("options", {}).get("set") or {}  # type: ignore[no-any-return]


def run_facts(folder: Path) -> dict[str, Any]:
    """The run that made a model; empty without recipe.json.

    Returns:
        `tokens` of all stages, `seed`, and of the last stage `rate`, that of new weights, and `tokens_per_second`, the
        median.
    """
    recipe, log = folder / "recipe.json", folder.parent / "log.jsonl"
    if not recipe.is_file() or not log.is_file():
        return {}
    settings = json.loads(recipe.read_text())
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    last = {row["stage"]: row for row in rows}
    speeds = [row["tokens_per_second"] for row in rows if row["stage"] == rows[-1]["stage"] and row["step"] > 0]
    return {
        "tokens": sum(row["tokens"] for row in last.values()),
        "seed": settings["seed"],
        "rate": settings["stages"][-1]["optimizer"]["mixer_lr"],
        "tokens_per_second": float(np.median(speeds)),
    }
