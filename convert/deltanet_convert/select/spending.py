"""Turns a budget in bytes into numbers of whole units and the longest window of all others."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from deltanet_kernels.packed_cache.layout import GROUP

from .budget import Budget
from .cache_sizes import CacheSizes
from .units import Unit

SHORTEST = GROUP + 1  # tokens of a window; in a packed cache it takes one group
TRIED = 10  # numbers of kept units besides 0, at most
LONGEST = 16384  # tokens of the texts that ways to spend a budget are measured on, at most


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

    @property
    def length(self) -> int:
        """Tokens of the texts that allocations are measured on."""
        return min(self.longest, LONGEST)

    def counts(self) -> list[int]:
        """The numbers of kept units that are tried, ascending."""
        return sorted({round(step * self.most / TRIED) for step in range(TRIED + 1)})

    def window(self, kept: Sequence[Unit]) -> int | None:
        """The longest window of the units that are not kept; None if the shortest takes too much."""
        windows = range(SHORTEST, self.longest + 1)
        place = bisect.bisect_right(windows, self.allowed, key=lambda window: self.sizes.total(kept, window))
        return windows[place - 1] if place else None
