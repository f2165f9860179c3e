"""Training and testing of one tiny model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, nn
from torch.nn import functional as F

from deltanet_hf.errors import QualityError
from deltanet_recipes.lab.tasks import IGNORED, Task

WARMUP = 0.05  # share of the steps in which the learning rate rises; it falls by a cosine to FINAL after them
FINAL = 0.05  # of the learning rate, in the last step
CLIP = 1.0  # largest norm of the gradient
SMOOTH = 0.98  # of the running accuracy that is shown
TEST_SEED = 1 << 32  # added to the seed for test data
TEST_TOKENS = 1 << 15  # per point


@dataclass(frozen=True)
class TrainSettings:
    """How a model is trained.

    Args:
        steps: optimiser steps of AdamW without weight decay, which would pull strengths away from 2.
        rate: largest learning rate.
        batch_tokens: tokens per step.
    """

    steps: int
    rate: float
    batch_tokens: int


Show = Callable[[int, float], None]
"""(steps done, running accuracy in training)"""


def train(model: nn.Module, task: Task, settings: TrainSettings, seed: int, show: Show) -> float:
    """Train on the task; returns the running accuracy at the end. The data depend on `seed` alone.

    Raises:
        QualityError: the loss is not finite.
    """
    device = next(model.parameters()).device
    generator = Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    accuracy = torch.zeros((), device=device)
    total = torch.zeros((), device=device)
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate * _schedule(step / settings.steps)
        inputs, labels = task.training_batch(settings.batch_tokens, step / settings.steps, generator)
        inputs, labels = inputs.to(device), labels.to(device)
        logits = model(inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        hits = (logits.detach().argmax(-1) == labels).sum() / (labels != IGNORED).sum()
        accuracy, total = SMOOTH * accuracy + (1 - SMOOTH) * hits, SMOOTH * total + (1 - SMOOTH)
        if step % 50 == 49 or step + 1 == settings.steps:  # reading a value waits for the device
            if not math.isfinite(loss.item()):
                raise QualityError(f"the loss is {loss.item()} after {step + 1} steps; lower --rate")
            show(step + 1, float(accuracy / total))
    return float(accuracy / total)


def _schedule(progress: float) -> float:
    if progress < WARMUP:
        return max(progress / WARMUP, 0.02)
    return FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP)))


@torch.no_grad()
def accuracies(model: nn.Module, task: Task, seed: int, tokens: int = TEST_TOKENS) -> dict[int, float]:
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
