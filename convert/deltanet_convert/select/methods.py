"""The rules by which the next unit is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from .scoring import ScaledLoss
from .units import Unit

SCORED_ALWAYS = 48  # up to so many candidates, each is scored in every round
RANKING_STEP = 4  # more are ranked by derivatives on every 4th probe
SHORTLIST = 6  # the steepest of them are then scored on all probes


@dataclass(frozen=True)
class Round:
    """One unit that was kept.

    Attributes:
        unit: the unit.
        score: with this and all earlier units kept: 0 is the teacher, 1 windows everywhere.
        gains: what the units scored in this round would have taken off the score (`gradient`: their derivatives).
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
            slopes = _slopes(self._few, kept, candidates)
            candidates = sorted(sorted(candidates, key=lambda unit: -slopes[unit])[:SHORTLIST])
        gains, scores = self.score.with_each(kept, candidates)
        best = min(candidates, key=lambda unit: scores[unit])
        return Round(best, scores[best], gains)

    @cached_property
    def _few(self) -> ScaledLoss:
        return self.score.thinned(RANKING_STEP)


class Gradient:
    """Keeps the unit with the steepest derivative of the score with respect to its gate; all are taken each round."""

    def __init__(self, score: ScaledLoss, units: Sequence[Unit]) -> None:
        self.score, self.units = score, units

    def __call__(self, kept: list[Unit]) -> Round:
        slopes = _slopes(self.score, kept, [unit for unit in self.units if unit not in kept])
        best = max(slopes, key=lambda unit: slopes[unit])
        return Round(best, self.score.of([*kept, best]), slopes)


def _slopes(score: ScaledLoss, kept: list[Unit], candidates: Sequence[Unit]) -> dict[Unit, float]:
    """How steeply the score falls with the gate of each candidate."""
    derivatives = score.gradients(kept)
    return {unit: -float(derivatives[unit].sum()) for unit in candidates}
