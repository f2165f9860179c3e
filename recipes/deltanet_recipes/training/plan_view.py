"""Shows memory and time of each stage as a table before training."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict

import torch
from rich.console import Console
from rich.table import Table

from deltanet_convert.device import thread_count
from deltanet_hf.safe_write import write_atomically
from deltanet_recipes.schema import Stage, stage_name
from deltanet_recipes.training.estimate import LESS_MEMORY, Estimate
from deltanet_recipes.training.logbook import Logbook
from deltanet_recipes.training.runtime import Runtime

UTILISATION = 0.25  # share of the measured rate of matrix products that a training step of a small model reaches
PLAN = "plan.json"
_CPU_NOTE = "; memory: resident, with all libraries"


def show_plan(
    title: str, stages: Sequence[Stage], plan: Sequence[Estimate], finished: int, runtime: Runtime, logbook: Logbook
) -> None:
    """Print the plan without its first `finished` stages, which have been trained before; write all to plan.json."""
    rows = [
        {
            "stage": stage_name(stage),
            "mixer_parameters": found.in_mixers,
            "rest_parameters": found.rest,
            "memory_gib": found.peak.total / 2**30,
            "memory_parts": asdict(found.peak),
            "flops_per_token": asdict(found.flops),
        }
        for stage, found in zip(stages, plan, strict=True)
    ]
    figures = {"device": _device_name(runtime), "processes": runtime.world, "stages": rows}
    write_atomically(logbook.folder / PLAN, (json.dumps(figures, indent=1) + "\n").encode())
    if ahead := list(zip(stages, plan, strict=True))[finished:]:
        print_plan(title, ahead, runtime, logbook.console)


def print_plan(title: str, plan: Sequence[tuple[Stage, Estimate]], runtime: Runtime, console: Console) -> None:
    """Print one row per stage: trained parameters, tokens, steps, rows, memory, and the time it will take."""
    table = Table(
        title=f"{title} on {runtime.world} x {_device_name(runtime)}",
        caption=f"mixers, rest: numbers of trained parameters{_CPU_NOTE * (runtime.device.type == 'cpu')}",
        padding=(0, 0),
    )
    disk = ["disk"] if any(found.disk for _, found in plan) else []
    sizes = ("stage", "mixers", "rest", "tokens", "steps x tokens", "rows at once", "memory, about")
    for column in (*sizes, *disk, "time, about"):
        table.add_column(column, justify="left" if column == "stage" else "right", overflow="fold")
    rate = _matmul_rate(runtime) * UTILISATION * runtime.world
    for stage, found in plan:
        seconds = found.flops.total * stage.steps * stage.batch_tokens / rate
        on_disk = [f"{found.disk / 2**30:.1f} GiB" if found.disk else "-"] if disk else []
        table.add_row(
            stage_name(stage),
            f"{found.in_mixers / 1e6:.1f}M",
            f"{found.rest / 1e6:.1f}M",
            _count(stage.steps * stage.batch_tokens),
            f"{stage.steps:,} x {stage.batch_tokens:,}",
            f"{found.rows} x {stage.sequence_length:,}",
            f"{found.peak.total / 2**30:.1f} GiB",
            *on_disk,
            _duration(seconds),
        )
    console.print(table)
    there = runtime.attainable_memory()
    for stage, found in plan:
        if found.peak.total > there:
            console.print(
                f"{stage_name(stage)}: expects about {found.peak.total / 2**30:.1f} GiB of memory, but only "
                f"{there / 2**30:.1f} GiB are free; {LESS_MEMORY}",
                highlight=False,
                soft_wrap=not console.is_terminal,
            )


def _matmul_rate(runtime: Runtime) -> float:
    """Measure the floating-point operations per second of a matrix product on this device."""
    size = 4096 if runtime.device.type == "cuda" else 768
    a = torch.randn(size, size, device=runtime.device, dtype=runtime.compute_dtype)
    best = math.inf
    for _ in range(4):
        began = time.perf_counter()
        float((a @ a)[0, 0])
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def _device_name(runtime: Runtime) -> str:
    if runtime.device.type == "cuda":
        return torch.cuda.get_device_name(runtime.device)
    return f"CPU ({thread_count()})"


def _count(tokens: int) -> str:
    return f"{tokens / 1e6:.2f}M" if tokens >= 10**6 else f"{tokens:,}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
