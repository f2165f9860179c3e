"""A measured value with its standard error."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

_LARGEST_LOSS = 700.0  # nats; exp of more overflows a float64


@dataclass(frozen=True)
class Score:
    """A measured value.

    Attributes:
        stderr: standard error of `value`; nan if there is one item only.
        items: number of independent items.
    """

    value: float
    stderr: float
    items: int

    def to_dict(self) -> dict[str, float | None]:
        """JSON form; an unknown error is null."""
        return {**asdict(self), "stderr": None if math.isnan(self.stderr) else self.stderr}

    def exp(self) -> Score:
        """exp of a mean loss in nats; its error follows from the delta method."""
        value = math.exp(min(self.value, _LARGEST_LOSS))
        return Score(value, value * self.stderr, self.items)
