"""How the windows of a budget in bytes are shared among the layers: longer where text needs them.

In some layers a window of 64 tokens is as good as one of 200, in others one of 800 is far better. Each layer's window
alone is made shorter and longer, and the KL divergence on running text is measured each time. The lengths that together
have the least sum of these within the bytes are found by a price per byte (a Lagrange multiplier), at which every layer
takes what is cheapest for it. MoA (arXiv 2406.14909) chooses lengths per head by the gradients of the loss instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .scoring import Tick
from .spending import Spending
from .units import Unit

SHARES = (1.0, 0.25, 0.5, 2.0, 4.0)  # of the window that all layers had; of equals the first is taken
HALVINGS = 60  # of the interval that holds the price


def window_shares(
    spending: Spending,
    kept: Sequence[Unit],
    alike: Sequence[int],
    kl: float,
    text_kl: Callable[[Sequence[int]], float],
    tick: Tick,
) -> list[float]:
    """The share of each layer, one of `SHARES`; 1 for layers without a window, which no share changes.

    Args:
        kept: units that stay whole.
        alike: windows of the others that fit the budget, by layer, all of one length.
        kl: the KL divergence with these.
        text_kl: the KL divergence with others.
        tick: called with the share of the work that is done.
    """
    before = spending.sizes.total(kept, alike)
    losses, sizes = [], []
    for layer, window in enumerate(alike):
        tried = [[*alike[:layer], spending.in_groups(window * share), *alike[layer + 1 :]] for share in SHARES]
        sizes.append([spending.sizes.total(kept, windows) - before for windows in tried])
        losses.append([text_kl(windows) if size else kl for windows, size in zip(tried, sizes[-1], strict=True)])
        tick((layer + 1) / len(alike))
    return [SHARES[place] for place in cheapest(losses, sizes, spending.allowed - before)]


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
