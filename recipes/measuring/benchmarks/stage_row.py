"""The figures of one stage of a training run, from its log and its plan."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from deltanet_recipes.training.logbook import read_log
from deltanet_recipes.training.plan_view import PLAN

PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense products in bfloat16, operations per second of one GPU (NVIDIA's data sheets), by a part of its name."""
WARM_UP = 2  # rows of the log in which layers are compiled, graphs captured and kernels chosen


def stage_figures(run: Path, stage: str) -> dict[str, Any]:
    """Figures of a stage.

    Args:
        run: folder of the run.
        stage: its name. Layerwise alignment logs one stage per layer, NAME.LAYER: losses are means over these.

    Returns:
        loss_first and loss_last (means over one interval of the log), kl_first and kl_last where there is one,
        tokens_per_s (median over the intervals after the first ones), flops_per_token (`training/estimate.py`),
        share_of_peak of all GPUs together (None for a device whose peak is not known), memory_gib and planned_gib (of
        one process), device.
    """
    plan = json.loads((run / PLAN).read_text())
    planned = next(entry for entry in plan["stages"] if entry["stage"] == stage)
    parts: dict[str, list[dict[str, Any]]] = {}
    for row in read_log(run):
        if "loss" in row and (row["stage"] == stage or row["stage"].startswith(f"{stage}.")):
            parts.setdefault(row["stage"], []).append(row)
    rows = [row for part in parts.values() for row in part]
    steady = [row["tokens_per_second"] for part in parts.values() for row in (part[WARM_UP:] or part[-1:])]
    speed = statistics.median(steady)
    flops = sum(planned["flops_per_token"].values()) / len(parts)
    peak = next((value for name, value in PEAK.items() if name in plan["device"]), None)
    figures: dict[str, Any] = {"device": plan["device"]}
    for name in ("loss", "kl"):
        if name in rows[0]:
            figures[f"{name}_first"] = statistics.mean(part[0][name] for part in parts.values())
            figures[f"{name}_last"] = statistics.mean(part[-1][name] for part in parts.values())
    return figures | {
        "tokens_per_s": round(speed),
        "flops_per_token": flops,
        "share_of_peak": None if peak is None else round(flops * speed / (peak * plan["processes"]), 3),
        "memory_gib": round(max(row["memory_gib"] for row in rows), 2),
        "planned_gib": round(planned["memory_gib"], 2),
    }
