"""Tiny runs of a recipe that stop somewhere, and comparisons of what came of them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from deltanet_recipes.training import pipeline
from deltanet_recipes.training.trainer import Trainer
from support.tiny_run import ALIGN, DISTIL, losses, tiny_recipe

STAGES = [{**ALIGN, "mode": "layerwise", "tokens": 128 * 3, "cached_tokens": 256}, {**DISTIL, "tokens": 128 * 7}]


class Stop(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def train(workplace: Path, out: Path, stages: list[dict[str, Any]], **changes: Any) -> str:
    """Run a recipe; returns what it printed."""
    said = io.StringIO()
    pipeline.run(tiny_recipe(workplace, out, *stages, **changes), console=Console(file=said, width=1000))
    return said.getvalue()


def undisturbed(workplace: Path, out: Path) -> Path:
    """The output of a run that nothing disturbs, without plots."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "draw_plots", lambda *args: [])
        train(workplace, out, STAGES)
    return out


def outcome(out: Path) -> tuple[list[tuple[str, int, float]], dict[str, torch.Tensor]]:
    """The losses in the log, by stage and step, and the final weights."""
    return losses(out), load_file(out / "final" / "model.safetensors")


def assert_same(out: Path, expected: Path) -> None:
    (rows, weights), (wanted_rows, wanted) = outcome(out), outcome(expected)
    assert sorted(rows) == sorted(wanted_rows)
    assert len(rows) == len(set(rows))
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def stop_at(patch: pytest.MonkeyPatch, label: str, step: int) -> None:
    real = Trainer.optimiser_step

    def stopped(self: Trainer) -> Any:
        if (self.label, self.step) == (label, step):
            raise Stop
        return real(self)

    patch.setattr(Trainer, "optimiser_step", stopped)
