"""Names the tensors that the layers of a cache hold, for a session's file and back.

Names are `keys`, `values`, the names of a mixer's state, or for a layer with mixed heads those of its parts, as
`window.keys`. The tensors are complete: everything else follows from the number of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from deltanet_hf.mixers.cache.mixed_cache import MixedCacheLayer
from deltanet_hf.mixers.cache.packed_reach import PACKED
from deltanet_hf.mixers.cache.state import MixerCacheLayer
from deltanet_kernels.packed_cache.layout import GROUP

Layout = tuple[tuple[int, ...], torch.dtype]


class UnsupportedLayer(Exception):
    """A layer of a cache that has no form in a file."""


def contents(layer: Any, window: int | None = None) -> dict[str, Tensor]:
    """Everything that a layer holds.

    Args:
        window: the model's sliding window there, of which a cache that was made without its config knows nothing.

    Raises:
        UnsupportedLayer: a static or a quantised layer of transformers.
    """
    if isinstance(layer, MixedCacheLayer):
        parts = layer.parts.items()
        return {f"{part}.{name}": tensor for part, inner in parts for name, tensor in contents(inner, window).items()}
    if isinstance(layer, MixerCacheLayer) and not layer.static_length:
        return dict(layer.state)
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise UnsupportedLayer(type(layer).__name__)
    if not layer.is_initialized or layer.keys is None:
        return {}
    held = {"keys": layer.keys, "values": layer.values}
    if isinstance(layer, DynamicSlidingWindowLayer):  # it holds more while it records its past
        window = layer.sliding_window
    if window is not None:
        held = {name: tensor[:, :, -window + 1 :] for name, tensor in held.items()}
    return held


def expected(layer: Any, batch: int, tokens: int) -> dict[str, Layout]:
    """Shapes and dtypes of what a layer holds after `tokens` tokens, from a layer that has read one token."""
    if isinstance(layer, MixedCacheLayer):
        parts = layer.parts.items()
        return {f"{part}.{name}": one for part, inner in parts for name, one in expected(inner, batch, tokens).items()}
    if isinstance(layer, MixerCacheLayer):
        return {name: (_state_shape(name, held, batch, tokens), held.dtype) for name, held in layer.state.items()}
    length = tokens
    layouts: dict[str, Layout] = {}
    if isinstance(layer, DynamicSlidingWindowLayer):
        length = min(tokens, layer.sliding_window - 1)
    for name in ("keys", "values"):
        held = getattr(layer, name)
        layouts[name] = ((batch, held.shape[1], length, held.shape[3]), held.dtype)
    return layouts


def _state_shape(name: str, held: Tensor, batch: int, tokens: int) -> tuple[int, ...]:
    """The shape of a tensor that has the shape of `held` after one token; packed keys and values may grow."""
    if name in PACKED and held.shape[2] == 0:
        return (batch, held.shape[1], max(0, tokens - 1) // GROUP, *held.shape[3:])
    return (batch, *held.shape[1:])


def put(layer: Any, held: dict[str, Tensor], tokens: int) -> None:
    """Make a layer that has read something hold what another one held after `tokens` tokens."""
    if isinstance(layer, MixedCacheLayer):
        for part, inner in layer.parts.items():
            prefix = f"{part}."
            put(inner, {name.removeprefix(prefix): held[name] for name in held if name.startswith(prefix)}, tokens)
        return
    if isinstance(layer, MixerCacheLayer):
        layer.put(held, tokens)
        return
    layer.keys, layer.values = held["keys"], held["values"]
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = tokens
