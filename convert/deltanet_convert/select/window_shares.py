"""How the windows of a budget in bytes are shared among the layers: longer where text needs them.

In some layers a window of 64 tokens is as good as one of 200, in others one of 800 is far better. Each layer's window
alone is made shorter and longer, and the KL divergence on running text is measured each time. The lengths that together
have the least sum of these within the bytes are found by a price per byte (a Lagrange multiplier), at which every layer
takes what is cheapest for it. Sums are right near the lengths that they were measured at, so a second pass in smaller
steps follows. MoA (arXiv 2406.14909) chooses lengths per head by the gradients of the loss instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .spending import Spending
from .units import Unit

PASSES = ((1.0, 0.25, 0.5, 2.0, 4.0), (1.0, 0.7, 1.4))
"""Shares of the window that a layer had before, by pass; of equals the first is taken."""
HALVINGS = 60  # of the interval that holds the price


def window_shares(
    spending: Spending,
    kept: Sequence[Unit],
    windows: Sequence[int],
    shares: Sequence[float],
    text_changes: Callable[[Sequence[Sequence[int]]], list[float]],
) -> list[float]:
    """The best of the shares for each layer; the first, 1, for layers without a window, which no share changes.

    Args:
        kept: units that stay whole.
        windows: those of the others, by layer, which fit the budget.
        text_changes: what each of others changes in the KL divergence with these.
    """
    before = spending.sizes.total(kept, windows)
    measured: list[list[int]] = []
    sizes = []
    for layer, window in enumerate(windows):
        tried = [[*windows[:layer], spending.in_groups(window * share), *windows[layer + 1 :]] for share in shares]
        sizes.append([spending.sizes.total(kept, some) - before for some in tried])
        measured += [some for some, size in zip(tried, sizes[-1], strict=True) if size]
    found = iter(text_changes(measured))
    losses = [[next(found) if size else 0.0 for size in row] for row in sizes]
    return [shares[place] for place in cheapest(losses, sizes, spending.allowed - before)]


def cheapest(losses: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], allowed: int) -> list[int]:
    """The place in each row of losses [L, S] that keeps their sum small while that of the sizes is `allowed` at most.

    Optimal among choices of at most its size (H. Everett, Operations Research 11, 1963).
    """

    def at(price: float) -> list[int]:
        return [
            min(range(len(loss)), key=lambda place: loss[place] + price * size[place])
            for loss, size in zip(losses, sizes, strict=True)
        ]

    def fits(places: list[int]) -> bool:
        return sum(size[place] for place, size in zip(places, sizes, strict=True)) <= allowed

    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(at(middle)) else (middle, high)
    return at(high)
