"""The model of a folder, and the facts of its making that the folder holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deltanet_hf.loading import load_model


def load_for_measure(folder: str, device: torch.device) -> nn.Module:
    """Load a teacher or student in eval mode, in bfloat16 on a GPU and float32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return nn.Module.to(load_model(folder, Path(folder), dtype, attn_implementation="sdpa"), device)


def run_facts(folder: Path) -> dict[str, Any]:
    """The run that made a model, `tokens` of all stages and `seed`; empty without recipe.json."""
    recipe, log = folder / "recipe.json", folder.parent / "log.jsonl"
    if not recipe.is_file() or not log.is_file():
        return {}
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    tokens = {row["stage"]: row["tokens"] for row in rows}  # the last row of a stage counts all of its tokens
    return {"tokens": sum(tokens.values()), "seed": json.loads(recipe.read_text())["seed"]}
