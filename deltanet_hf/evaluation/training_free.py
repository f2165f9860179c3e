"""Free policies: the teacher under windows whose cache is as large as a student's, without any training.

A student has to be better than these, because they cost nothing. At equal bytes there are two: windows in every layer,
and the layers that the student keeps as they are with windows in the others.
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Collection

from transformers import PreTrainedModel

from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_hf.models.cache_bits import stored_bytes
from deltanet_hf.models.restrict import restrict_to_window

SINKS = 4


def with_windows(
    teacher: PreTrainedModel, kept: Collection[int], window: int | None, sinks: int = SINKS
) -> PreTrainedModel:
    """A copy of the teacher with some layers as they are and a window in the others.

    Layers whose own sliding window is not longer stay as they are: a second window would only cost memory.

    Args:
        kept: layers without a window.
        window: the most recent tokens that the other layers see; None leaves the teacher as it is.
        sinks: the tokens at the start that they also see.
    """
    model = copy.deepcopy(teacher)
    if window is None:
        return model
    own = {layer: sliding_window(model.config, layer) for layer in range(model.config.num_hidden_layers)}
    layers = [i for i, size in own.items() if i not in kept and (size is None or size > window + sinks)]
    return restrict_to_window(model, window, sinks, layers) if layers else model


def longest_window(teacher: PreTrainedModel, kept: Collection[int], budget: int, tokens: int, bits: int) -> int | None:
    """The longest window with which a sequence of `tokens` tokens fits into `budget` bytes; None if none does.

    Args:
        kept: layers that stay as they are.
        bits: of keys and values.
    """

    def size(window: int) -> int:
        return stored_bytes(with_windows(teacher, kept, window), tokens, bits)

    return bisect.bisect_right(range(1, tokens + 1), budget, key=size) or None
