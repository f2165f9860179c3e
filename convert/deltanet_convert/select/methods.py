"""The rules by which the next unit is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from .scoring import ScaledLoss
from .units import Unit

SCORED_ALWAYS = 48  # up to so many candidates, each is scored in every round
RANKING_STEP = 4  # more are ranked by derivatives on every 4th probe
SHORTLIST = 6  # the steepest of them are then scored on all probes
PATH = (0.25, 0.75)  # gates of all units at which `Gradient` takes derivatives


@dataclass(frozen=True)
class Round:
    """One unit that was kept.

    Attributes:
        unit: the unit.
        score: with this and all earlier units kept: 0 is the teacher, 1 windows everywhere.
        gains: what the units scored in this round would have taken off the score.
    """

    unit: Unit
    score: float
    gains: dict[Unit, float]


NextUnit = Callable[[list[Unit]], Round]
"""From the kept units, in order, to the round that keeps one more."""


class Forward:
    """Keeps the unit that lowers the score most."""

    def __init__(self, score: ScaledLoss, units: Sequence[Unit]) -> None:
        self.score, self.units = score, units

    def __call__(self, kept: list[Unit]) -> Round:
        candidates = [unit for unit in self.units if unit not in kept]
        if len(self.units) > SCORED_ALWAYS:
            slopes = _slopes(self._few, self._few.gates(kept), candidates)
            candidates = sorted(sorted(candidates, key=lambda unit: -slopes[unit])[:SHORTLIST])
        gains, scores = self.score.with_each(kept, candidates)
        best = min(candidates, key=lambda unit: scores[unit])
        return Round(best, scores[best], gains)

    @cached_property
    def _few(self) -> ScaledLoss:
        return self.score.thinned(RANKING_STEP)


class Gradient:
    """Keeps the unit that takes most off the score while all open together from windows to full attention.

    That is the integral of the score's derivative with respect to the unit's gate (integrated gradients, arXiv
    1703.01365) by the midpoint rule. Where only its end in windows is seen, heads are missed that need others: an
    induction head finds nothing while the heads that it reads from are windows.
    """

    def __init__(self, score: ScaledLoss, units: Sequence[Unit]) -> None:
        self.score, self.units = score, units

    def __call__(self, kept: list[Unit]) -> Round:
        gains = {unit: gain for unit, gain in self._gains.items() if unit not in kept}
        best = max(gains, key=lambda unit: gains[unit])
        return Round(best, 1 - sum(self._gains[unit] for unit in [*kept, best]), gains)

    @cached_property
    def _gains(self) -> dict[Unit, float]:
        none = self.score.gates(())
        parts = [_slopes(self.score, none.clamp_min(place), self.units) for place in PATH]
        return {unit: sum(part[unit] for part in parts) / len(PATH) for unit in self.units}


def _slopes(score: ScaledLoss, gates: Tensor, candidates: Sequence[Unit]) -> dict[Unit, float]:
    """How steeply the score falls with the gate of each candidate."""
    derivatives = score.gradients(gates)
    return {unit: -float(derivatives[unit].sum()) for unit in candidates}
