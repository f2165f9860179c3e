"""Window dropout: how often the layers do without the window beside their state, step by step.

A branch that is right from the start leaves nothing to learn for the one beside it: the window explains most of the
teacher's output, and the state stays idle. Rows without the window train the state alone (arXiv 2510.05901).
"""

from __future__ import annotations

import random

import torch
from torch import nn

from deltanet_recipes.schema_sections import WindowDropout


class WindowDropoutSchedule:
    """Sets the probability in every `window_branch` with trained weights in `module`.

    The probability is a buffer that is changed in place, because a CUDA graph reads its address. The random numbers of
    a step depend on the seed, the process and the step alone, so that a resumed run draws the same.

    Args:
        settings: the first and the last probability; None for no dropout, which leaves the branches alone.
        steps: optimiser steps of the stage.
        seed: seed of the run.
        rank: number of this process.
    """

    def __init__(self, module: nn.Module, settings: WindowDropout | None, steps: int, seed: int, rank: int) -> None:
        self.settings, self.steps, self.seed, self.rank = settings, steps, seed, rank
        branches = [] if settings is None else window_branches(module)
        for branch in branches:
            branch.train()  # the other modules stay in evaluation mode: teachers may have dropout of their own
        self._branches = branches
        self._buffers: list[torch.Tensor] = [branch.dropout for branch in branches]  # type: ignore[misc]
        self.set(0.0)

    def probability(self, step: int) -> float:
        """The probability in a step, counted from 0."""
        if self.settings is None:
            return 0.0
        return self.settings.start + (self.settings.end - self.settings.start) * step / max(1, self.steps - 1)

    def begin(self, step: int) -> None:
        """Call this before a training step."""
        if self._buffers:
            # A CPU's generator reads 32 bits of its seed only.
            torch.manual_seed(random.Random(f"window dropout {self.seed} {self.rank} {step}").getrandbits(32))
            self.set(self.probability(step))

    def set(self, probability: float) -> None:
        """Give all branches one probability; 0 for an evaluation."""
        for buffer in self._buffers:
            buffer.fill_(probability)

    def end(self) -> None:
        """Leave the branches as they are used after training."""
        self.set(0.0)
        for branch in self._branches:
            branch.eval()


def window_branches(module: nn.Module) -> list[nn.Module]:
    """The branches for the window beside a state that have trained weights, in order."""
    found = [getattr(part, "window_branch", None) for part in module.modules()]
    return [branch for branch in found if branch is not None and any(p.requires_grad for p in branch.parameters())]
