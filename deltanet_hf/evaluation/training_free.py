"""Free policies: the teacher under windows whose cache is as large as a student's, without any training.

A student has to be better than these, because they cost nothing. At equal bytes there are two: windows in every layer,
and the layers that the student keeps as they are with windows in the others.
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Collection
from dataclasses import dataclass

from transformers import PreTrainedModel

from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_hf.models.cache_bits import stored_bytes
from deltanet_hf.models.restrict import restrict_to_window

SINKS = 4


@dataclass(frozen=True)
class WindowPolicy:
    """The teacher with some layers as they are and a window in the others.

    Attributes:
        kept: layers without a window.
        window: the most recent tokens that the other layers see; None leaves the teacher as it is.
        sinks: the tokens at the start that they also see.
    """

    kept: tuple[int, ...]
    window: int | None
    sinks: int = SINKS

    def apply(self, teacher: PreTrainedModel) -> PreTrainedModel:
        """A copy of the teacher under this policy.

        Layers whose own sliding window is not longer stay as they are: a second window would only cost memory.
        """
        model = copy.deepcopy(teacher)
        if self.window is None:
            return model
        layers = [i for i in range(model.config.num_hidden_layers) if i not in self.kept and not self._has(model, i)]
        return restrict_to_window(model, self.window, self.sinks, layers) if layers else model

    def _has(self, model: PreTrainedModel, layer: int) -> bool:
        family_window = sliding_window(model.config, layer)
        return family_window is not None and self.window is not None and family_window <= self.window + self.sinks


def longest_window(teacher: PreTrainedModel, kept: Collection[int], budget: int, tokens: int, bits: int) -> int | None:
    """The longest window with which a sequence of `tokens` tokens fits into `budget` bytes; None if none does.

    Args:
        kept: layers that stay as they are.
        bits: of keys and values.
    """

    def size(window: int) -> int:
        return stored_bytes(WindowPolicy(tuple(kept), window).apply(teacher), tokens, bits)

    return bisect.bisect_right(range(1, tokens + 1), budget, key=size) or None
