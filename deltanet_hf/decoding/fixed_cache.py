"""The tensors of a cache at addresses that stay, while a recorded step reads and writes them.

The layers of a cache come in here for the length of one `generate` call: states are copied to this object's tensors,
which `MixerCacheLayer` then changes in place; growing keys and values move into `FixedKeyValues`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from deltanet_hf.decoding.fixed_key_values import FixedKeyValues, Places
from deltanet_hf.mixers.cache.mixed_cache import MixedCacheLayer
from deltanet_hf.mixers.cache.packed_reach import PACKED
from deltanet_hf.mixers.cache.state import MixerCacheLayer, State
from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_kernels.packed_cache.layout import GROUP

SPARE = 256  # places beyond the tokens of a cache, at least; otherwise an eighth of the tokens
ALIGNMENT = 64  # of the number of places
MASKED = ("full_attention", "sliding_attention", "linear_attention")  # kinds of layers whose masks are known here


class NotRecordable(Exception):
    """Why a step cannot be recorded, in words that follow a colon."""


class CachePart(NamedTuple):
    """One layer of a cache, or one part of a layer with mixed heads."""

    at: int
    mixed: MixedCacheLayer | None
    layer: Any


def parts_of(cache: Cache) -> Iterator[CachePart]:
    """All parts, in order."""
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, MixedCacheLayer):
            yield from (CachePart(index, layer, part) for part in list(layer.parts.values()))
        else:
            yield CachePart(index, None, layer)


def layout(cache: Cache, config: PreTrainedConfig) -> tuple[Any, ...]:
    """Shapes and dtypes of a cache that holds tokens, but for their number.

    Raises:
        NotRecordable: it has layers whose tensors cannot stay where they are.
    """
    if cache.offloading:
        raise NotRecordable("the cache is offloaded")
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in MASKED:
            raise NotRecordable(f"layers of the kind {kind} have masks of their own")
    return tuple(_part_layout(part, config) for part in parts_of(cache))


def _part_layout(part: CachePart, config: PreTrainedConfig) -> tuple[Any, ...]:
    layer = part.layer
    if type(layer) is MixerCacheLayer and layer.state:
        return tuple((name, _shape(layer, name, 0), tensor.dtype) for name, tensor in layer.state.items())
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) and layer.keys is not None and layer.keys.numel():
        if _window(layer) != sliding_window(config, part.at):
            raise NotRecordable(f"layer {part.at} of the cache has another window than the model")
        shapes = ((*x.shape[:2], x.shape[3]) for x in (layer.keys, layer.values))
        return (_window(layer), *shapes, layer.keys.dtype, layer.values.dtype)
    raise NotRecordable(f"layer {part.at} of the cache is a {type(layer).__name__}")


def _shape(layer: MixerCacheLayer, name: str, tokens: int) -> tuple[int, ...]:
    """The shape of a tensor of a state, where packed keys and values that grow have places for `tokens` tokens."""
    shape = tuple(layer.state[name].shape)
    if not layer.grows or name not in PACKED:
        return shape
    return (*shape[:2], max(0, tokens - 1) // GROUP, *shape[3:])


def _window(layer: Any) -> int | None:
    return layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None


def capacity_for(tokens: int, longest: int) -> int:
    """Places for a cache of so many tokens, of which there will be `longest` at most."""
    wanted = min(tokens + max(SPARE, tokens // 8), max(longest, tokens))
    return -(-wanted // ALIGNMENT) * ALIGNMENT


class FixedCache:
    """Room for the tensors of caches with one layout; `load` brings a cache in, `unload` gives it back.

    Args:
        cache: a cache with the layout, for its shapes.
        config: of the model.
        capacity: tokens for which there are to be places.
        mask_dtype: see `Places`.
    """

    def __init__(self, cache: Cache, config: PreTrainedConfig, capacity: int, mask_dtype: torch.dtype) -> None:
        self.capacity, self._seen = capacity, 0
        self._places: dict[int | None, Places] = {}
        self._room: list[State | FixedKeyValues] = []
        self._packed = False  # whether there are packed keys and values that grow
        device = torch.device("cpu")
        for part in parts_of(cache):
            layer = part.layer
            if isinstance(layer, MixerCacheLayer):
                device = next(iter(layer.state.values())).device
                shapes = {name: _shape(layer, name, capacity) for name in layer.state}
                self._packed = self._packed or layer.grows
                self._room.append({name: x.new_zeros(shapes[name]) for name, x in layer.state.items()})
                continue
            window, device = _window(layer), layer.keys.device
            if window not in self._places:
                self._places[window] = Places(layer.keys.shape[0], window, capacity, mask_dtype, device)
            self._room.append(FixedKeyValues(self._places[window]))
        self._count = torch.zeros(1, dtype=torch.long, device=device)
        self.mask = self._masks(config, device)

    @property
    def grows(self) -> bool:
        """Whether it holds keys and values of all tokens or of a family's own sliding window."""
        return bool(self._places) or self._packed

    @property
    def full(self) -> bool:
        """Whether there is no place for a further token."""
        return (self._packed and self._seen >= self.capacity) or any(
            self._seen >= places.size and (places.window is None or places.size < places.window)
            for places in self._places.values()
        )

    def _masks(self, config: PreTrainedConfig, device: torch.device) -> Any:
        """The attention mask for the model: one, or one per kind of layer. Layers with a state do not read it."""
        unread = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        types = getattr(config, "layer_types", None)
        if types is None:
            places = next(iter(self._places.values()), None)
            return unread if places is None else places.mask
        masks: dict[str, Tensor | None] = {}
        for index, kind in enumerate(types):
            places = self._places.get(sliding_window(config, index))
            masks[kind] = None if kind == "linear_attention" else unread if places is None else places.mask
        return masks

    def load(self, cache: Cache, seen: int, real: Tensor | None) -> None:
        """Bring a cache in that has seen `seen` tokens, of which `real` [B, seen] bool are no padding."""
        self._seen = seen
        self._count.fill_(seen)
        for places in self._places.values():
            places.load(seen, real)
        for part, room in zip(parts_of(cache), self._room, strict=True):
            if isinstance(room, FixedKeyValues):
                room.load(part.layer, seen)
                _replace(cache, part, room)
            else:
                for name, tensor in part.layer.state.items():
                    own = room[name]
                    if tensor.shape != own.shape:  # the first groups of those for which there are places
                        own = own[:, :, : tensor.shape[2]]
                    own.copy_(tensor)
                part.layer.fix(room, self.capacity if self.grows else None)

    def unload(self, cache: Cache, copied: bool = True) -> None:
        """Give the cache back its own layers; their states are `copied`, or this object's tensors."""
        for part, room in zip(parts_of(cache), self._room, strict=True):
            if isinstance(room, FixedKeyValues):
                _replace(cache, part, room.unload(self._seen))
            else:
                layer = part.layer
                layer.release(self._seen, copied)
                for name in PACKED if layer.grows else ():
                    layer.state[name] = layer.state[name][:, :, : max(0, self._seen - 1) // GROUP].contiguous()

    def enter(self) -> None:
        """The step's first work on the device: the next token gets its places."""
        for places in self._places.values():
            places.enter(self._count)
        if self._places:
            self._count.add_(1)

    @contextmanager
    def taken_back(self) -> Iterator[None]:
        """Take back the step that is run in here, on a cache without padding."""
        changed = [x for room in self._room for x in (room.values() if isinstance(room, dict) else room.at(self._seen))]
        before = [x.clone() for x in changed]
        yield
        for x, contents in zip(changed, before, strict=True):
            x.copy_(contents)
        self._count.fill_(self._seen)
        for places in self._places.values():
            places.load(self._seen, None)

    def advance(self) -> None:
        """Count a token on the host, after its step."""
        self._seen += 1

    @property
    def seen(self) -> int:
        return self._seen


def _replace(cache: Cache, part: CachePart, layer: Any) -> None:
    if part.mixed is None:
        cache.layers[part.at] = layer
    else:
        part.mixed.replace_growing(layer)
