"""The layers of transformers' caches under the contract of `protocol.py`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from deltanet_hf.mixers.cache.protocol import CacheLayer, State, TensorShape
from deltanet_hf.mixers.cache.static_key_values import StaticKeyValues

QUANTISED = ("_quantized_keys", "_quantized_values")  # where transformers' quantised layers keep them


class OtherLayer(CacheLayer):
    """A layer of transformers of which no more is known than its attributes: static, quantised, linear attention."""

    in_order = False

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        # Whether its tensors are replaced by new ones and never changed in place.
        self._replaces = isinstance(layer, DynamicLayer) and not isinstance(layer, LinearAttentionCacheLayerMixin)

    @property
    def unmovable(self) -> str | None:  # type: ignore[override]
        return type(self.layer).__name__

    @property
    def batch_size(self) -> int:
        keys = getattr(self.layer, "keys", None)
        return len(keys) if isinstance(keys, Tensor) and keys.dim() == 4 else -1

    @property
    def tokens(self) -> int | Tensor | None:
        return self.layer.get_seq_length() if hasattr(self.layer, "get_seq_length") else None

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(getattr(self.layer, name, None)) for name in ("keys", "values", *QUANTISED))

    def snapshot(self) -> dict[str, Any]:
        """Its attributes; growing keys and values are not copied, because a call makes new tensors of them."""
        return {name: value if self._replaces else _copied(value) for name, value in vars(self.layer).items()}

    def rewind(self, contents: dict[str, Any]) -> None:
        layer = self.layer
        for name in vars(layer).keys() - contents.keys():
            delattr(layer, name)
        for name, value in contents.items():
            now = getattr(layer, name, None)
            if self._replaces:
                setattr(layer, name, value)
            elif isinstance(value, Tensor) and isinstance(now, Tensor):
                now.copy_(value)
            else:
                setattr(layer, name, _copied(value))


class KeyValues(OtherLayer):
    """Keys and values of all tokens, each [B, H, T, D]."""

    in_order = True
    unmovable = None
    window: int | None = None

    @property
    def grows(self) -> bool:  # type: ignore[override]
        return self.window is None

    def tensors(self, window: int | None = None) -> State:
        window = self.window or window
        if self.batch_size < 0:
            return {}
        held = {"keys": self.layer.keys, "values": self.layer.values}
        if window is not None:  # sliding layers hold more while they record their past
            held = {name: x[:, :, -window + 1 :] for name, x in held.items()}
        return held

    def shapes(self, tokens: int) -> dict[str, TensorShape]:
        kept = tokens if self.window is None else min(tokens, self.window - 1)
        return {name: TensorShape((x.shape[1], kept, x.shape[3]), x.dtype) for name, x in self.tensors().items()}

    def put(self, tensors: State, tokens: int) -> None:
        self.layer.keys, self.layer.values = tensors["keys"], tensors["values"]

    def fits_window(self, window: int | None) -> bool:
        return self.window == window

    def takes_prompt(self, tokens: int) -> bool:
        return not self.layer.is_initialized and (self.window is None or tokens < self.window)

    def after(self, tokens: int, copied: Callable[[Tensor], Tensor]) -> Any:
        made = type(self)(copy.copy(self.layer))
        made.put({name: copied(getattr(self.layer, name)[:, :, :tokens]) for name in ("keys", "values")}, tokens)
        return made.layer

    def room(self, tokens: int, places: Callable[[int | None, Tensor], Any]) -> StaticKeyValues:
        return StaticKeyValues(places(self.window, self.layer.keys))

    def fix(self, room: StaticKeyValues, tokens: int, longest: int | None) -> StaticKeyValues:
        room.load(self.layer, tokens)
        return room


class SlidingKeyValues(KeyValues):
    """The same of the last tokens, within a sliding window."""

    @property
    def window(self) -> int:  # type: ignore[override]
        return int(self.layer.sliding_window)

    def put(self, tensors: State, tokens: int) -> None:
        super().put(tensors, tokens)
        self.layer.cumulative_length = tokens


KINDS: dict[type, type[OtherLayer]] = {DynamicLayer: KeyValues, DynamicSlidingWindowLayer: SlidingKeyValues}


def as_cache_layer(layer: Any) -> CacheLayer:
    """Any layer of a cache, or part of one, under the contract."""
    return layer if isinstance(layer, CacheLayer) else KINDS.get(type(layer), OtherLayer)(layer)


def _copied(value: Any) -> Any:
    """A copy of a tensor, or of the tensors in a dict; anything else as it is."""
    if isinstance(value, dict):
        return {key: _copied(inside) for key, inside in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


def _nbytes(held: Any) -> int:
    """Bytes of a tensor, or of all tensors inside a container or a quantised tensor."""
    if isinstance(held, Tensor):
        if not hasattr(held, "__tensor_flatten__"):
            return held.numel() * held.element_size()
        return sum(_nbytes(getattr(held, name)) for name in held.__tensor_flatten__()[0])
    inside = held.values() if isinstance(held, dict) else held if isinstance(held, (tuple, list)) else ()
    return sum(_nbytes(part) for part in inside)
