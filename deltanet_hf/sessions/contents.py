"""Names the tensors that the layers of a cache hold, for a session's file and back.

Names are `keys`, `values`, the names of a mixer's state, or for a layer with mixed heads those of its parts, as
`window.keys`. The tensors are complete: everything else follows from the number of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from deltanet_hf.mixers.mixed_cache import MixedCacheLayer
from deltanet_hf.mixers.quantized_cache import BLOCK, QuantizedKVLayer
from deltanet_hf.mixers.state import MixerCacheLayer

CODES = ("codes", "scale", "low")
Layout = tuple[tuple[int, ...], torch.dtype]


class UnsupportedLayer(Exception):
    """A layer of a cache that has no form in a file."""


def contents(layer: Any, window: int | None = None) -> dict[str, Tensor]:
    """Everything that a layer holds.

    Args:
        window: the model's sliding window there, of which a cache that was made without its config knows nothing.

    Raises:
        UnsupportedLayer: a static layer, or a quantised one of transformers.
    """
    if isinstance(layer, MixedCacheLayer):
        parts = layer.parts.items()
        return {f"{part}.{name}": tensor for part, inner in parts for name, tensor in contents(inner, window).items()}
    if isinstance(layer, MixerCacheLayer) and layer.static_length is None:
        return dict(layer.state)
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, QuantizedKVLayer):
        raise UnsupportedLayer(type(layer).__name__)
    if not layer.is_initialized or layer.keys is None:
        return {}
    held = {"keys": layer.keys, "values": layer.values}
    if isinstance(layer, DynamicSlidingWindowLayer):  # it holds more while it records its past
        window = layer.sliding_window
    if window is not None and not isinstance(layer, QuantizedKVLayer):
        held = {name: tensor[:, :, -window + 1 :] for name, tensor in held.items()}
    if isinstance(layer, QuantizedKVLayer):
        for name, quantised in (("keys", layer._quantized_keys), ("values", layer._quantized_values)):
            if quantised is None:
                continue
            held |= {f"{name}_{code}": tensor for code, tensor in zip(CODES, quantised, strict=True)}
    return held


def expected(layer: Any, batch: int, tokens: int) -> dict[str, Layout]:
    """Shapes and dtypes of what a layer holds after `tokens` tokens, from a layer that has read one token."""
    if isinstance(layer, MixedCacheLayer):
        parts = layer.parts.items()
        return {f"{part}.{name}": one for part, inner in parts for name, one in expected(inner, batch, tokens).items()}
    if isinstance(layer, MixerCacheLayer):
        return {name: ((batch, *held.shape[1:]), held.dtype) for name, held in layer.state.items()}
    length, layouts = tokens, {}
    if isinstance(layer, DynamicSlidingWindowLayer):
        length = min(tokens, layer.sliding_window - 1)
    if isinstance(layer, QuantizedKVLayer):
        blocks = max(0, tokens // BLOCK - 1)
        length = tokens - blocks * BLOCK
        for name, held in contents(layer.one_block()).items() if blocks else ():
            layouts[name] = ((batch, held.shape[1], held.shape[2] * blocks, *held.shape[3:]), held.dtype)
    for name in ("keys", "values"):
        held = getattr(layer, name)
        layouts[name] = ((batch, held.shape[1], length, held.shape[3]), held.dtype)
    return layouts


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
    if isinstance(layer, QuantizedKVLayer) and "keys_codes" in held:
        keys, values = ([held[f"{name}_{code}"] for code in CODES] for name in ("keys", "values"))
        layer._quantized_keys, layer._quantized_values = tuple(keys), tuple(values)  # type: ignore[assignment]
