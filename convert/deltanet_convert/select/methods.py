"""The rules by which the next unit is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from .scoring import Score
from .units import Unit

METHODS = ("forward", "gradient", "kl", "uniform")
EXPORTABLE = "exportable"  # how the file names the choice of `--exportable`

SCORED_ALWAYS = 48  # up to so many candidates, each is scored in every round
SWEPT_FIRST = 4  # with more, all are scored in the first rounds and whenever the number of kept units has doubled
SWEEP_STEP = 4  # a sweep uses every 4th probe
SHORTLIST = 6  # the candidates that gained most when they were last scored are then scored on all probes


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


NextUnit = Callable[[list[Unit], dict[Unit, float]], Round]
"""From the kept units, in order, and the gains last seen, to the round that keeps one more."""


class Forward:
    """Keeps the unit that lowers the score most."""

    def __init__(self, score: Score, units: Sequence[Unit]) -> None:
        self.score, self.units = score, units

    def __call__(self, kept: list[Unit], known: dict[Unit, float]) -> Round:
        candidates = [unit for unit in self.units if unit not in kept]
        gains: dict[Unit, float] = {}
        if len(self.units) > SCORED_ALWAYS:
            if len(kept) < SWEPT_FIRST or (len(kept) & (len(kept) - 1)) == 0:
                gains, _ = self._few.with_each(kept, candidates)
            last = {**known, **gains}
            candidates = sorted(sorted(candidates, key=lambda unit: -last[unit])[:SHORTLIST])
        exact, scores = self.score.with_each(kept, candidates)
        best = min(candidates, key=lambda unit: scores[unit])
        return Round(best, scores[best], {**gains, **exact})

    @cached_property
    def _few(self) -> Score:
        return self.score.thinned(SWEEP_STEP)


class Gradient:
    """Keeps the unit with the steepest derivative of the score with respect to its gate; all are taken each round."""

    def __init__(self, score: Score, units: Sequence[Unit]) -> None:
        self.score, self.units = score, units

    def __call__(self, kept: list[Unit], known: dict[Unit, float]) -> Round:
        derivatives = self.score.gradients(kept)
        gains = {unit: -float(derivatives[unit].sum()) for unit in self.units if unit not in kept}
        best = max(gains, key=lambda unit: gains[unit])
        return Round(best, self.score.of([*kept, best]), gains)
