"""Assigns the model's layers to the layers of the export, with idle layers in between where a runtime requires them.

All weights of an idle layer are zero. It adds nothing to the residual stream and may be inserted anywhere.

Idle layers have two uses. transformers' own class and mlx-lm read the number of tokens from the cache of an attention
layer and cannot generate without one, so a fully converted model ends with an idle attention layer. mlx-lm and
llama.cpp do not read a list of attention layers: every N-th layer is one. Where the kept layers are elsewhere, idle
layers fill the gaps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

BY_INTERVAL = ("mlx", "gguf")  # formats whose runtimes find attention layers by `full_attention_interval`


@dataclass(frozen=True)
class Slots:
    """The layers of an export.

    `sources[i]` is the model's layer at place i of the export, None for an idle layer. `softmax` lists the places of
    the softmax layers.
    """

    sources: tuple[int | None, ...]
    softmax: tuple[int, ...]

    @property
    def idle(self) -> int:
        return self.sources.count(None)


def fixed_interval(kept: Iterable[int], num_layers: int) -> int | None:
    """Returns N if the kept layers are exactly N-1, 2N-1, ...; num_layers + 1 if none is kept; otherwise None."""
    layers = list(kept)
    interval = layers[0] + 1 if layers else num_layers + 1
    return interval if layers == list(range(interval - 1, num_layers, interval)) else None


def arrange(kept: Iterable[int], num_layers: int, style: str) -> Slots:
    """Arranges an export in the format `style`: fewest idle layers first, then fewest attention layers."""
    softmax = tuple(sorted(kept))
    if not softmax:
        return Slots((*range(num_layers), None), (num_layers,))
    if style not in BY_INTERVAL:
        return Slots(tuple(range(num_layers)), softmax)
    found = [_spread(set(softmax), num_layers, interval) for interval in range(num_layers + 1, 1, -1)]
    return min(found, key=lambda slots: (len(slots.sources), len(slots.softmax)))


def _spread(kept: set[int], num_layers: int, interval: int) -> Slots:
    """Puts attention at the places N-1, 2N-1, ... only; where the next layer does not fit, an idle one is inserted."""
    sources: list[int | None] = []
    layer = 0
    while layer < num_layers:
        due = (len(sources) + 1) % interval == 0
        fits = due == (layer in kept)
        sources.append(layer if fits else None)
        layer += fits
    return Slots(tuple(sources), tuple(range(interval - 1, len(sources), interval)))


def uneven_note(kept: Iterable[int], num_layers: int) -> str | None:
    """Describes what kept layers at unequal distances cost in the formats `BY_INTERVAL`; None if they are equal."""
    layers = sorted(kept)
    if fixed_interval(layers, num_layers) is not None:
        return None
    idle = arrange(layers, num_layers, BY_INTERVAL[0]).idle
    return (
        f"Kept layers {layers} are not N-1, 2N-1, ...; mlx-lm and llama.cpp, which support only a fixed "
        f"interval, get {idle} idle layers of zeros among the {num_layers}: the same function, "
        f"{idle / num_layers:.0%} more work. Layers chosen by --keep every:N need no idle layers."
    )
