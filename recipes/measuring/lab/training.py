"""Training and testing of one tiny model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, nn
from torch.nn import functional as F

from deltanet_hf.errors import QualityError
from measuring.lab.tasks import IGNORED, Task

WARMUP = 0.05  # share of the steps in which the learning rate rises; it falls by a cosine to FINAL after them
FINAL = 0.05  # of the learning rate, in the last step
CLIP = 1.0  # largest norm of the gradient
LAST_LEVEL_AT = 0.75  # share of the steps behind which all are of the last level
BLOCK = 20  # steps between looks at the accuracy
TEST_SEED = 1 << 32  # added to the seed for test data


@dataclass(frozen=True)
class TrainSettings:
    """How a model is trained.

    Args:
        steps: optimiser steps of AdamW.
        rate: largest learning rate.
        batch_tokens: tokens per step.
        decay: weight decay on all levels but the last. Without it strengths may come so near 0 and 2 that elements
            which join later hardly learn; on the last level it would keep them away from 2.
    """

    steps: int
    rate: float
    batch_tokens: int
    decay: float = 0.0


Show = Callable[[int, int, float], None]
"""(steps done, level, accuracy over the last steps)"""


def train(model: nn.Module, task: Task, settings: TrainSettings, seed: int, show: Show) -> int:
    """Train on the task; returns the level that was reached. The data depend on `seed` and the levels alone.

    The last quarter is trained on the last level whatever was reached, so that no model is tested on what it never saw.

    Raises:
        QualityError: the loss is not finite.
    """
    device = next(model.parameters()).device
    generator = Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, betas=(0.9, 0.98))
    model.train()
    level, hits = 0, torch.zeros((), device=device)
    for step in range(settings.steps):
        trained = level if step < LAST_LEVEL_AT * settings.steps else task.levels - 1
        for group in optimizer.param_groups:
            group["lr"] = settings.rate * _schedule(step / settings.steps)
            group["weight_decay"] = settings.decay if trained < task.levels - 1 else 0.0
        inputs, labels = task.training_batch(settings.batch_tokens, trained, generator)
        inputs, labels = inputs.to(device), labels.to(device)
        logits = model(inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        hits += (logits.detach().argmax(-1) == labels).sum() / (labels != IGNORED).sum()
        if step % BLOCK == BLOCK - 1:  # not every step, because reading a value waits for the device
            if not math.isfinite(loss.item()):
                raise QualityError(f"the loss is {loss.item()} after {step + 1} steps; lower --rate")
            accuracy = float(hits) / BLOCK
            show(step + 1, trained, accuracy)
            if trained == level:
                level = min(task.levels - 1, level + (accuracy >= task.promoted))
            hits.zero_()
    return level


def _schedule(progress: float) -> float:
    if progress < WARMUP:
        return max(progress / WARMUP, 0.02)
    return FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP)))


@torch.no_grad()
def accuracies(model: nn.Module, task: Task, seed: int, tokens: int) -> dict[int, float]:
    """Accuracy at every point of the task, on about `tokens` tokens each."""
    device = next(model.parameters()).device
    generator = Generator().manual_seed(TEST_SEED + seed)
    model.eval()
    found = {}
    for point, (inputs, labels) in task.test_batches(tokens, generator):
        predicted = model(inputs.to(device), use_cache=False).logits.argmax(-1).cpu()
        counted = labels != IGNORED
        found[point] = float((predicted == labels)[counted].double().mean())
    return found
