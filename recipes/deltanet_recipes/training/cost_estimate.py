"""Estimates memory and time of each stage and prints them as a table before training."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass

import torch
from rich.table import Table
from torch import nn

from deltanet_convert.device import thread_count
from deltanet_recipes.schema import Align, DistilBase, Recipe, Stage, stage_name, stage_tokens
from deltanet_recipes.training.adapters import adapter_weights, inserted_norms, mixers_in_full
from deltanet_recipes.training.feeds import micro_batch_rows
from deltanet_recipes.training.flops import Flops, training_flops
from deltanet_recipes.training.logbook import Logbook
from deltanet_recipes.training.memory_estimate import Memory, expected_memory
from deltanet_recipes.training.model_pair import decoder_layers, mixers
from deltanet_recipes.training.runtime import Runtime

UTILISATION = 0.25  # share of the measured rate of matrix products that a training step of a small model reaches
PLAN = "plan.json"
_CPU_NOTE = "; memory: resident, with all libraries"


@dataclass(frozen=True)
class Estimate:
    """The estimated sizes of a stage.

    Attributes:
        mixer_parameters: trained parameters of mixers.
        rest_parameters: other trained parameters.
        peak: parts of the peak memory of one process.
        flops: floating-point operations per training token; for layerwise alignment, of all layers together.
        disk: bytes of the teacher's activations that all processes together keep on disk.
    """

    mixer_parameters: int
    rest_parameters: int
    peak: Memory
    flops: Flops
    disk: int = 0

    @property
    def memory(self) -> int:
        """Peak memory of one process in bytes."""
        return self.peak.total


def estimate(stage: Stage, recipe: Recipe, student: nn.Module, runtime: Runtime) -> Estimate:
    """Estimate a stage from the shapes of its tensors, before the first stage has run."""
    layers = decoder_layers(student)
    mixer = _size(*(mixers(student).values() if isinstance(stage, Align) else mixers_in_full(student, stage)))
    rest = _rest(stage, student, sum(p.numel() for p in layers.parameters()) - mixer)
    adapters = 0 if isinstance(stage, Align) else adapter_weights(student, stage)
    peak = expected_memory(stage, recipe, student, runtime, mixer + rest)
    flops = training_flops(stage, student, mixer + rest, adapters)
    return Estimate(mixer, rest, peak, flops, _disk(stage, recipe, student, runtime))


def _disk(stage: Stage, recipe: Recipe, student: nn.Module, runtime: Runtime) -> int:
    if not isinstance(stage, Align) or stage.mode == "joint":
        return 0
    tokens = stage_tokens(stage) + recipe.data.holdout_tokens
    # Hidden states, attention inputs and attention outputs, which every process keeps for itself.
    hidden = int(student.config.hidden_size)  # type: ignore[union-attr, arg-type]
    return 3 * (2 if runtime.bf16 else 4) * hidden * tokens * runtime.world


def _rest(stage: Stage, student: nn.Module, layer_weights: int) -> int:
    if isinstance(stage, Align):
        return 0
    assert isinstance(stage, DistilBase)
    if stage.train == "full":
        return layer_weights + _size(student.model.norm)  # type: ignore[union-attr, arg-type]
    new = _size(*inserted_norms(student))
    return new + adapter_weights(student, stage)


def _size(*modules: nn.Module) -> int:
    """The number of parameters of the modules; tied parameters count once."""
    return sum(p.numel() for p in {p for module in modules for p in module.parameters()})


def show_plan(
    recipe: Recipe, stages: list[Stage], finished: int, student: nn.Module, runtime: Runtime, logbook: Logbook
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
    sizes = [estimate(stage, recipe, student, runtime) for stage in stages]
    disk = ["disk"] if any(size.disk for size in sizes) else []
    for column in (
        "stage",
        "mixers",
        "rest",
        "tokens",
        "steps x tokens",
        "rows at once",
        "memory",
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
            f"{micro_batch_rows(stage, runtime.world)} x {stage.sequence_length:,}",
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
                f"{stage_name(stage)}: expects {size.memory / 2**30:.1f} GiB of memory, but only {there / 2**30:.1f} "
                "GiB are free; lower micro_batch_rows or loss_chunk, or set engine.gradient_checkpointing=true"
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
