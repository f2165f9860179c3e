"""The comparison of one runtime with deltanet-hf's model, and the tables that show comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table

# The order of sums alone gave 2e-4 in 30 layers; a wrong rewrite gives 1e-1 and more.
LEAST_TOLERANCE = 1e-2
OURS = "deltanet-hf"
NOISE_FACTOR = 2.0  # a margin, because the mean is over a few hundred values with a heavy tail


@dataclass(frozen=True)
class Comparison:
    """One runtime in one mode, compared with deltanet-hf's model along the tokens that the runtime decoded."""

    runtime: str
    mode: str
    tokens: int = 0
    equal: int = 0  # tokens that are the most likely ones in deltanet-hf's model too
    read: float = 0.0  # largest difference of a log-probability directly after a prompt
    decoded: float = 0.0  # and after a token decoded with the runtime's own cache
    mean: float = 0.0
    margin: float = 0.0  # largest log-probability by which deltanet-hf's best token exceeds the runtime's
    ours: float | None = 0.0  # mean difference that the dtype makes in deltanet-hf's model; None if quantised
    own: float | None = None  # and in the runtime itself, if it also supports float32
    speed: tuple[float, float] = (0.0, 0.0)  # tokens per second: read, decoded
    text: str = field(default="", repr=False)

    @property
    def largest(self) -> float:
        return max(self.read, self.decoded)

    @property
    def within(self) -> bool:
        """Whether rounding explains the differences.

        In float32, every single difference is compared with `LEAST_TOLERANCE`. In fewer bits, single differences have
        no bound, and the mean is compared with the mean of the runtime's own rounding or, if it has no float32, with
        the mean of the rounding in deltanet-hf's model. Quantised weights have no bound.
        """
        if self.ours is None:
            return self.tokens > 0
        if self.ours == 0.0:
            return self.tokens > 0 and max(self.largest, self.margin) <= LEAST_TOLERANCE
        rounding = self.ours if self.own is None else self.own
        return self.tokens > 0 and self.mean <= max(LEAST_TOLERANCE, NOISE_FACTOR * rounding)


def differences_table(found: list[Comparison]) -> Table:
    """Table of the largest differences after a prompt and while decoding, the mean, and the mean of rounding alone."""
    columns = ("same", "read", "decoded", "mean", "rounding")
    table = _table("Differences of log-probabilities from deltanet-hf in float32", columns)
    table.add_column("")
    for one in found:
        verdict = "differs" if not one.within else "quantised" if one.ours is None else "ok"
        noise = _short(one.own) if one.own is not None else f"{_short(one.ours)}, {OURS}" if one.ours else "-"
        figures = (_short(one.read), _short(one.decoded), _short(one.mean), noise)
        table.add_row(one.runtime, one.mode, f"{one.equal}/{one.tokens}", *figures, verdict)
    return table


def speeds_table(found: list[Comparison]) -> Table:
    """Table of the speeds of each runtime and mode."""
    table = _table("Tokens per second, one sequence", ("read", "decoded"))
    for one in found:
        table.add_row(one.runtime, one.mode, *(f"{value:.1f}" if value else "-" for value in one.speed))
    return table


def _table(title: str, numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("runtime", "dtype"):
        table.add_column(heading)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def _short(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-").replace("e+00", "")
