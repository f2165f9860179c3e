"""Estimates memory and time of each stage and prints them as a table before training."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from torch import nn
from transformers import PreTrainedModel

from deltanet_convert.device import thread_count
from deltanet_recipes.schema import Align, Recipe, Stage, stage_name, stage_tokens
from deltanet_recipes.training.adapters import merge_lora, train_for, train_mixers
from deltanet_recipes.training.feeds import micro_batch_rows
from deltanet_recipes.training.flops import Flops, attention_weights, training_flops
from deltanet_recipes.training.logbook import Logbook
from deltanet_recipes.training.memory_estimate import Memory, stage_memory
from deltanet_recipes.training.model_pair import mixers
from deltanet_recipes.training.runtime import Runtime

UTILISATION = 0.25  # share of the measured rate of matrix products that a training step of a small model reaches
PLAN = "plan.json"
_CPU_NOTE = "; memory: resident, with all libraries"


@dataclass(frozen=True)
class Estimate:
    """The estimated sizes of a stage.

    Attributes:
        rows: rows that one process works on at once.
        mixer_parameters: trained parameters of mixers.
        rest_parameters: other trained parameters.
        peak: parts of the peak memory of one process.
        flops: floating-point operations per training token; for layerwise alignment, of all layers together.
        disk: bytes of the teacher's activations that all processes together keep on disk.
    """

    rows: int
    mixer_parameters: int
    rest_parameters: int
    peak: Memory
    flops: Flops
    disk: int = 0

    @property
    def memory(self) -> int:
        """Peak memory of one process in bytes."""
        return self.peak.total


def estimates(stages: Sequence[Stage], recipe: Recipe, student: PreTrainedModel, runtime: Runtime) -> list[Estimate]:
    """Estimates of consecutive stages.

    Each stage is prepared as it will be when it runs, on a copy of the student without memory.

    Args:
        student: the model before the first of the stages; it is not changed.
    """
    model, found = _without_memory(student), []
    attention, converted = attention_weights(student), mixers(model)
    parts = [part for mixer in converted.values() for part in mixer.new_parts()]
    for stage in stages:
        rows = micro_batch_rows(stage, runtime.world)
        if isinstance(stage, Align):
            train_mixers(model)
        else:
            train_for(model, stage, recipe.seed)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        adapters = {p for name, p in trained.items() if "lora_" in name}
        in_mixers = {p for part in parts for p in part.parameters()} - adapters
        own, total = _numel(in_mixers & set(trained.values())), _numel(trained.values())
        peak = stage_memory(stage, recipe, model, converted, attention, rows, runtime)
        merge_lora(model)
        flops = training_flops(stage, model, converted, attention, total, _numel(adapters))
        found.append(Estimate(rows, own, total - own, peak, flops, _disk(stage, recipe, student, runtime)))
    return found


def _without_memory(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose parameters are on the meta device."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    return deepcopy(model, memo)


def _numel(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)


def _disk(stage: Stage, recipe: Recipe, student: nn.Module, runtime: Runtime) -> int:
    if not isinstance(stage, Align) or stage.mode == "joint":
        return 0
    tokens = stage_tokens(stage) + recipe.data.holdout_tokens
    # Hidden states, attention inputs and attention outputs, which every process keeps for itself.
    hidden = int(student.config.hidden_size)  # type: ignore[union-attr, arg-type]
    return 3 * (2 if runtime.bf16 else 4) * hidden * tokens * runtime.world


def show_plan(
    recipe: Recipe, stages: list[Stage], finished: int, student: PreTrainedModel, runtime: Runtime, logbook: Logbook
) -> None:
    """Print one row per stage: trained parameters, tokens, steps, rows, memory, and the time it will take.

    The first `finished` stages have been trained before and are left out. The figures of all stages are also written to
    plan.json in the folder of the run.
    """
    if not runtime.main:
        return
    rate = _matmul_rate(runtime) * UTILISATION * runtime.world
    table = Table(
        title=f"{recipe.student} -> {recipe.output} on {runtime.world} x {_device_name(runtime)}",
        caption=f"mixers, rest: numbers of trained parameters{_CPU_NOTE * (runtime.device.type == 'cpu')}",
        padding=(0, 0),
    )
    sizes = estimates(stages, recipe, student, runtime)
    disk = ["disk"] if any(size.disk for size in sizes) else []
    for column in (
        "stage",
        "mixers",
        "rest",
        "tokens",
        "steps x tokens",
        "rows at once",
        "memory, about",
        *disk,
        "time, about",
    ):
        table.add_column(column, justify="left" if column == "stage" else "right", overflow="fold")
    planned = list(zip(stages, sizes, strict=True))
    for stage, size in planned[finished:]:
        seconds = size.flops.total * stage.steps * stage.batch_tokens / rate
        on_disk = [f"{size.disk / 2**30:.1f} GiB" if size.disk else "-"] if disk else []
        table.add_row(
            stage_name(stage),
            f"{size.mixer_parameters / 1e6:.1f}M",
            f"{size.rest_parameters / 1e6:.1f}M",
            _count(stage.steps * stage.batch_tokens),
            f"{stage.steps:,} x {stage.batch_tokens:,}",
            f"{size.rows} x {stage.sequence_length:,}",
            f"{size.memory / 2**30:.1f} GiB",
            *on_disk,
            _duration(seconds),
        )
    if planned[finished:]:
        logbook.console.print(table)
    there = runtime.attainable_memory()
    for stage, size in planned[finished:]:
        if size.memory > there:
            logbook.say(
                f"{stage_name(stage)}: expects about {size.memory / 2**30:.1f} GiB of memory, but only "
                f"{there / 2**30:.1f} GiB are free; lower micro_batch_rows or loss_chunk, or set "
                "engine.gradient_checkpointing=true"
            )
    rows = [
        {
            "stage": stage_name(stage),
            "mixer_parameters": size.mixer_parameters,
            "rest_parameters": size.rest_parameters,
            "memory_gib": size.memory / 2**30,
            "memory_parts": asdict(size.peak),
            "flops_per_token": asdict(size.flops),
        }
        for stage, size in planned
    ]
    plan = {"device": _device_name(runtime), "processes": runtime.world, "stages": rows}
    (logbook.folder / PLAN).write_text(json.dumps(plan, indent=1) + "\n")


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
