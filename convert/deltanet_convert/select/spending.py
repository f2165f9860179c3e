"""Turns a budget in bytes into numbers of whole units and the longest windows of all others."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from deltanet_hf.mixers.cache.quantised_cache_spec import whole_window

from .budget import Budget
from .cache_sizes import CacheSizes
from .units import Unit, evenly

SHORTEST = whole_window(1)  # tokens of a window; in a packed cache it takes one group
TRIED = 10  # numbers of kept units besides 0, at most
WHOLE_SHARE = 0.28  # of the bytes, for whole units whose number is not measured: as in the plans for 3.1 and 5.4 MB


class Spending:
    """The whole units and windows that a budget in bytes allows.

    Args:
        budget: a budget in bytes.
        sizes: of caches at its length.

    Raises:
        UserError: see `Budget.units_of_bytes`.
    """

    def __init__(self, budget: Budget, sizes: CacheSizes) -> None:
        self.sizes = sizes
        self.allowed = budget.allowed(sizes)
        self.most = budget.units_of_bytes(sizes, SHORTEST)
        self.longest = max(SHORTEST, min(sizes.at, int(sizes.teacher.config.max_position_embeddings)))

    def counts(self) -> list[int]:
        """The numbers of kept units that are tried, ascending."""
        return sorted({round(step * self.most / TRIED) for step in range(TRIED + 1)})

    def usual_count(self) -> int:
        """The number of kept units where numbers are not compared: their bytes beyond windows are `WHOLE_SHARE`."""
        units, shortest = self.sizes.candidates.units, [SHORTEST] * self.sizes.teacher.num_layers
        enough = self.sizes.total((), shortest) + WHOLE_SHARE * self.allowed
        counts = range(1, self.most + 1)
        return bisect.bisect_right(counts, enough, key=lambda count: self.sizes.total(evenly(units, count), shortest))

    def windows(self, kept: Sequence[Unit], shares: Sequence[float]) -> tuple[int, ...] | None:
        """The longest windows of the units that are not kept, by layer; None if the shortest take too much.

        Args:
            shares: how long they are in proportion to each other.
        """

        def lengths(base: int) -> tuple[int, ...]:
            return tuple(self.in_groups(base * share) for share in shares)

        bases = range(1, int(self.longest / min(shares)) + 1)
        place = bisect.bisect_right(bases, self.allowed, key=lambda base: self.sizes.total(kept, lengths(base)))
        return lengths(bases[place - 1]) if place else None

    def in_groups(self, tokens: float) -> int:
        """A window of about so many tokens, before which a packed cache keeps whole groups."""
        return whole_window(min(tokens, self.longest))
