"""Estimates memory and time of each stage and prints them as a table before training."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import nn

from deltanet_recipes.schema import Align, DistilBase, Recipe, Stage, stage_name, stage_tokens
from deltanet_recipes.training.adapters import inserted_norms, mixers_in_full, stage_targets
from deltanet_recipes.training.feeds import micro_batch_rows
from deltanet_recipes.training.logbook import Logbook
from deltanet_recipes.training.model_pair import decoder_layers, mixers, output_weight
from deltanet_recipes.training.runtime import Runtime

UTILISATION = 0.25  # share of the measured rate of matrix products that a training step of a small model reaches


@dataclass(frozen=True)
class Estimate:
    """The estimated sizes of a stage.

    Attributes:
        mixer_parameters: trained parameters of mixers.
        rest_parameters: other trained parameters.
        memory: peak memory of one process, bytes.
        flops_per_token: floating-point operations per training token.
        disk: bytes of the teacher's outputs that all processes together keep on disk.
    """

    mixer_parameters: int
    rest_parameters: int
    memory: int
    flops_per_token: float
    disk: int = 0


def estimate(stage: Stage, recipe: Recipe, student: nn.Module, runtime: Runtime) -> Estimate:
    """Estimate a stage from the shapes of its tensors.

    The teacher is counted in the compute dtype; a trained weight counts 16 bytes, with its gradient and AdamW's state.
    """
    layers, vocabulary = decoder_layers(student), output_weight(student).shape[0]
    total = sum(p.numel() for p in student.parameters())
    in_layers = sum(p.numel() for p in layers.parameters())
    mixer = _size(*(mixers(student).values() if isinstance(stage, Align) else mixers_in_full(student, stage)))
    rest = _rest(stage, student, in_layers - mixer)
    width = 2 if runtime.bf16 else 4
    micro = micro_batch_rows(stage, runtime.world) * stage.sequence_length
    config: Any = student.config
    mlp = getattr(config, "intermediate_size", 4 * config.hidden_size)
    per_layer = micro * width * (14 * config.hidden_size + 4 * mlp)
    shards = runtime.world if recipe.engine.sharding == "fsdp2" else 1
    if isinstance(stage, Align) and stage.mode == "layerwise":
        largest = max(sum(p.numel() for p in layer.parameters()) for layer in layers)
        one = mixer // max(1, len(mixers(student)))
        memory = width * largest + 16 * one + per_layer
        # Hidden states, attention inputs and attention outputs, which every process keeps for itself.
        disk = 3 * width * config.hidden_size * (stage_tokens(stage) + recipe.data.holdout_tokens) * runtime.world
        return Estimate(mixer, 0, memory, (2 * in_layers + 6 * mixer) * 1.0, disk)
    weights = (width * total * 2 + 16 * (mixer + rest)) // shards
    if isinstance(stage, Align):
        activations = micro * width * 14 * config.hidden_size * len(mixers(student))
        return Estimate(mixer, 0, weights + activations, 2.0 * in_layers + 6.0 * mixer)
    kept = len(layers) if not recipe.engine.gradient_checkpointing else 2
    windowed = stage.recall_weight > 0  # one more pass of the teacher, and its logits
    logits = 4 * (5 + windowed) * min(stage.loss_chunk, micro) * vocabulary
    flops = 2.0 * total * (2 + windowed if stage.top_k is None else 1) + 4.0 * total
    entry = (2 if vocabulary <= 1 << 16 else 4) + 2  # a token id and its log-probability
    disk = (stage_tokens(stage) + recipe.data.holdout_tokens) * (stage.top_k or 0) * entry
    return Estimate(mixer, rest, weights + per_layer * kept + logits, flops, disk)


def _rest(stage: Stage, student: nn.Module, layer_weights: int) -> int:
    if isinstance(stage, Align):
        return 0
    assert isinstance(stage, DistilBase)
    if stage.train == "full":
        if stage.train_embeddings:
            return _size(student) - _size(*mixers(student).values())
        return layer_weights + _size(student.model.norm)  # type: ignore[union-attr, arg-type]
    new = _size(*inserted_norms(student))
    if stage.train == "frozen":
        return new
    modules = dict(student.named_modules())
    names = stage_targets(student, stage)
    return new + sum(stage.lora.rank * sum(modules[name].weight.shape) for name in names)  # type: ignore[union-attr, misc]


def _size(*modules: nn.Module) -> int:
    """The number of parameters of the modules; tied parameters count once."""
    return sum(p.numel() for p in {p for module in modules for p in module.parameters()})


def show_plan(recipe: Recipe, stages: list[Stage], student: nn.Module, runtime: Runtime, logbook: Logbook) -> None:
    """Print one row per stage: trained parameters, tokens, steps, rows, memory, and the time it will take."""
    if not runtime.main:
        return
    rate = _matmul_rate(runtime) * UTILISATION * runtime.world
    table = Table(
        title=f"{recipe.student} -> {recipe.output} on {runtime.world} x {_device_name(runtime)}",
        caption="mixers, rest: numbers of trained parameters",
        padding=(0, 0),
    )
    sizes = [estimate(stage, recipe, student, runtime) for stage in stages]
    disk = ["disk"] if any(size.disk for size in sizes) else []
    for column in ("stage", "mixers", "rest", "tokens", "steps x tokens", "rows", "memory", *disk, "time, about"):
        table.add_column(column, justify="left" if column == "stage" else "right", overflow="fold")
    for stage, size in zip(stages, sizes, strict=True):
        seconds = size.flops_per_token * stage.steps * stage.batch_tokens / rate
        on_disk = [f"{size.disk / 2**30:.1f} GiB" if size.disk else "-"] if disk else []
        table.add_row(
            stage_name(stage),
            f"{size.mixer_parameters / 1e6:.1f}M",
            f"{size.rest_parameters / 1e6:.1f}M",
            _count(stage.steps * stage.batch_tokens),
            f"{stage.steps:,} x {stage.batch_tokens:,}",
            f"{stage.rows_per_step} x {stage.sequence_length:,}",
            f"{size.memory / 2**30:.1f} GiB",
            *on_disk,
            _duration(seconds),
        )
    logbook.console.print(table)


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
    return f"CPU ({torch.get_num_threads()} threads)"


def _count(tokens: int) -> str:
    return f"{tokens / 1e6:.2f}M" if tokens >= 10**6 else f"{tokens:,}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
