"""Which layer of the model stands at which place of the export, and where idle layers stand between them.

An idle layer has only zeros for weights: it adds nothing to the residual stream, so it may stand anywhere.

Two needs are met by it. transformers' own class and mlx-lm read the number of tokens seen off an attention layer's
cache and cannot generate without one: a fully converted model ends with an idle attention layer. And mlx-lm and
llama.cpp know no list of attention layers, only that every N-th is one: where the kept layers stand otherwise, idle
layers fill the gaps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

BY_INTERVAL = ("mlx", "gguf")  # formats whose runtimes derive the attention layers from `full_attention_interval`


@dataclass(frozen=True)
class Slots:
    """`sources[i]` is the model's layer at place i of the export, None for an idle one; `softmax` are places."""

    sources: tuple[int | None, ...]
    softmax: tuple[int, ...]

    @property
    def idle(self) -> int:
        return self.sources.count(None)


def fixed_interval(kept: Iterable[int], num_layers: int) -> int | None:
    """N when the kept layers are exactly N-1, 2N-1, ...; num_layers + 1 when none is kept; None otherwise."""
    layers = list(kept)
    interval = layers[0] + 1 if layers else num_layers + 1
    return interval if layers == list(range(interval - 1, num_layers, interval)) else None


def arrange(kept: Iterable[int], num_layers: int, style: str) -> Slots:
    """The places of an export in a format, with the fewest idle layers, and of those the fewest attention layers."""
    softmax = tuple(sorted(kept))
    if not softmax:
        return Slots((*range(num_layers), None), (num_layers,))
    if style not in BY_INTERVAL:
        return Slots(tuple(range(num_layers)), softmax)
    found = [_spread(set(softmax), num_layers, interval) for interval in range(num_layers + 1, 1, -1)]
    return min(found, key=lambda slots: (len(slots.sources), len(slots.softmax)))


def _spread(kept: set[int], num_layers: int, interval: int) -> Slots:
    """Attention at the places N-1, 2N-1, ... only: a layer of the wrong kind waits for the next place."""
    sources: list[int | None] = []
    layer = 0
    while layer < num_layers:
        due = (len(sources) + 1) % interval == 0
        fits = due == (layer in kept)
        sources.append(layer if fits else None)
        layer += fits
    return Slots(tuple(sources), tuple(range(interval - 1, len(sources), interval)))


def uneven_note(kept: Iterable[int], num_layers: int) -> str | None:
    """What an uneven choice of layers costs in the formats `BY_INTERVAL`."""
    layers = sorted(kept)
    if fixed_interval(layers, num_layers) is not None:
        return None
    idle = arrange(layers, num_layers, BY_INTERVAL[0]).idle
    return (
        f"Kept layers {layers} are not N-1, 2N-1, ...; mlx-lm and llama.cpp, which know only a fixed interval, get "
        f"{idle} idle layers of zeros among the {num_layers}: the same function, {idle / num_layers:.0%} more work. "
        "Layers chosen by --layers every:N need none."
    )
