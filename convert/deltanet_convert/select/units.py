"""The units that a selection chooses among: layers, or key/value heads of layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

Unit = tuple[int, ...]
"""(layer,) or (layer, key/value head)."""
UNITS = ("layer", "kv_head")
SHORT = 1024  # tokens of a sliding window up to which converting the layer saves too little


@dataclass(frozen=True)
class Candidates:
    """The units to choose among, and the layers that are not chosen, because their own cache is small.

    Attributes:
        units: what may be kept, ascending.
        local: layers that attend within a short sliding window of the family's own; they stay as they are.
        window: that sliding window, or that of a family in which every layer slides, in tokens; None if there is none.
    """

    units: tuple[Unit, ...]
    local: tuple[int, ...]
    window: int | None

    @classmethod
    def of(cls, config: Any, unit: str) -> Candidates:
        """The candidates of a teacher. A layer with a long sliding window is one, and so is each where all slide.

        Args:
            config: the teacher's.
            unit: one of `UNITS`.
        """
        from deltanet_hf.mixers.layer.masks import sliding_window

        layers = range(int(config.num_hidden_layers))
        longest = int(config.max_position_embeddings)
        windows = {layer: window for layer in layers if (window := sliding_window(config, layer) or longest) < longest}
        all_slide = len(windows) == len(layers)
        local = () if all_slide else tuple(layer for layer, window in windows.items() if window <= SHORT)
        full = [layer for layer in layers if layer not in local]
        heads = range(int(config.num_key_value_heads))
        units = [(layer,) for layer in full] if unit == "layer" else [(i, head) for i in full for head in heads]
        return cls(tuple(units), local, min(windows.values()) if local or all_slide else None)

    def note(self) -> str | None:
        """Says which layers have a sliding window and what that means for the choice; None if there are none."""
        if self.window is None:
            return None
        if not self.local:
            return f"Every layer slides over {self.window} tokens: a kept one keeps that window."
        return (
            f"Layers {list(self.local)} attend within the teacher's own window of {self.window} tokens: their cache "
            "does not grow, so they stay as they are, and the choice is among the others."
        )


def whole_heads(kept: Collection[Unit], local: Collection[int], kv_heads: int) -> dict[int, list[int]]:
    """The key/value heads by layer, ascending, of units `kept` and layers `local`; of a whole layer, all."""
    found: dict[int, list[int]] = {}
    for layer, *head in sorted([*kept, *((layer,) for layer in local)]):
        found.setdefault(layer, []).extend(head or range(kv_heads))
    return found


def to_json(unit: Unit) -> int | list[int]:
    """A layer as its index, a head as [layer, head]."""
    return unit[0] if len(unit) == 1 else list(unit)


def every_nth(num_layers: int, count: int) -> list[Unit]:
    """The layers n-1, 2n-1, ... for the smallest n that keeps at most `count`: the pattern that an export needs."""
    step = next(n for n in range(2, num_layers + 1) if num_layers // n <= count)
    return [(layer,) for layer in range(step - 1, num_layers, step)]


def evenly(units: Sequence[Unit], count: int) -> list[Unit]:
    """`count` of the units at equal distances, the middle one of each part."""
    return [units[(2 * i + 1) * len(units) // (2 * count)] for i in range(count)]
