"""The cache of a layer whose heads are of different kinds: one part per branch, each of the size that it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from deltanet_hf.mixers.cache.cache_layer import layer_at, new_layer, refuse_filled
from deltanet_hf.mixers.cache.key_values import as_cache_layer
from deltanet_hf.mixers.cache.protocol import CacheLayer, State, TensorShape
from deltanet_hf.mixers.cache.state import MixerCacheLayer, StaysOnDevice


class MixedCacheLayer(CacheLayer, CacheLayerMixin):
    """Parts by the names of the branches; all of them have seen the same tokens.

    The growing part, if there is one, is the key/value layer that transformers made for the layer, whatever its class:
    growing, sliding, static, quantised. `Cache.update` reaches it as in any other layer, and only that part goes to the
    CPU in an offloaded cache. The other parts are `MixerCacheLayer`. Tensors have the name of their part in front.
    """

    supports_early_init = False
    owner = "mixed"

    def __init__(self, parts: dict[str, Any], growing: str | None = None) -> None:
        self.keys = self.values = None
        self.parts, self._growing = parts, growing

    @property
    def growing(self) -> Any:
        """The growing part; None if there is none."""
        return None if self._growing is None else self.parts[self._growing]

    @property
    def first(self) -> Any:
        """The part that knows the tokens."""
        return next(iter(self.parts.values())) if self._growing is None else self.parts[self._growing]

    @property
    def _constant(self) -> list[Any]:
        return [part for name, part in self.parts.items() if name != self._growing]

    @property
    def _held(self) -> dict[str, CacheLayer]:
        """The parts under their contract."""
        return {name: as_cache_layer(part) for name, part in self.parts.items()}

    @property
    def static_length(self) -> int:
        """Tokens of a static cache that the layer stands in; 0 for others."""
        return max((part.static_length for part in self._constant), default=0)

    @property
    def written(self) -> Tensor | None:  # type: ignore[override]
        return next((part.written for part in self._held.values() if part.written is not None), None)

    @written.setter
    def written(self, ids: Tensor | None) -> None:
        for part in self._held.values():
            part.written = ids

    @property
    def grows(self) -> bool:  # type: ignore[override]
        return any(part.grows for part in self._held.values())

    @property
    def unmovable(self) -> str | None:  # type: ignore[override]
        return next((part.unmovable for part in self._held.values() if part.unmovable), None)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._held.values())

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return bool(self.first.is_initialized)

    @property
    def is_sliding(self) -> bool:  # type: ignore[override]
        return bool(self.first.is_sliding)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return all(part.is_croppable for part in self.parts.values())

    @property
    def record_past(self) -> bool:
        return any(getattr(part, "record_past", False) for part in self.parts.values())

    @record_past.setter
    def record_past(self, recording: bool) -> None:
        for part in self.parts.values():
            if hasattr(part, "record_past"):  # parts that grow without bound need none
                part.record_past = recording

    def activate_past_recording(self) -> None:
        self.record_past = True

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        return all(part.is_compileable for part in self.parts.values())

    @property
    def batch_size(self) -> int:
        return max(part.batch_size for part in self._held.values())

    def tensors(self, window: int | None = None) -> State:
        held = self._held.items()
        return {f"{part}.{name}": x for part, layer in held for name, x in layer.tensors(window).items()}

    def shapes(self, tokens: int) -> dict[str, TensorShape]:
        held = self._held.items()
        return {f"{part}.{name}": shape for part, layer in held for name, shape in layer.shapes(tokens).items()}

    def put(self, tensors: State, tokens: int) -> None:
        for part, layer in self._held.items():
            prefix = f"{part}."
            own = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
            layer.put(own, tokens)

    def fits_window(self, window: int | None) -> bool:
        return all(part.fits_window(window) for part in self._held.values())

    def snapshot(self) -> dict[str, Any]:
        return {name: part.snapshot() for name, part in self._held.items()}

    def rewind(self, contents: dict[str, Any]) -> None:
        for name, part in self._held.items():
            part.rewind(contents[name])

    def after(self, tokens: int, copied: Callable[[Tensor], Tensor]) -> MixedCacheLayer:
        return type(self)({name: part.after(tokens, copied) for name, part in self._held.items()}, self._growing)

    def room(self, tokens: int, places: Callable[[int | None, Tensor], Any]) -> dict[str, Any]:
        return {name: part.room(tokens, places) for name, part in self._held.items()}

    def fix(self, room: dict[str, Any], tokens: int, longest: int | None) -> MixedCacheLayer:
        self.parts = {name: part.fix(room[name], tokens, longest) for name, part in self._held.items()}
        return self

    def release(self, tokens: int, copied: bool) -> MixedCacheLayer:
        self.parts = {name: part.release(tokens, copied) for name, part in self._held.items()}
        return self

    def changed(self, number: int) -> Iterable[Tensor]:
        return [x for part in self._held.values() for x in part.changed(number)]

    def get_seq_length(self) -> int:
        return self.first.get_seq_length()  # type: ignore[no-any-return]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.first.get_mask_sizes(query_length)  # type: ignore[no-any-return]

    def get_max_length(self) -> int:
        return self.first.get_max_length()  # type: ignore[no-any-return]

    get_max_cache_shape = get_max_length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.growing is not None
        return self.growing.update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("lazy_initialization: the parts of a layer with mixed heads are made by their first call")

    def offload(self) -> None:
        if self.growing is not None:
            self.growing.offload()

    def prefetch(self) -> None:
        if self.growing is not None:
            self.growing.prefetch()

    def reset(self) -> None:
        for part in self.parts.values():
            part.reset()

    def crop(self, tokens_to_remove: int) -> None:
        for part in (*self._constant, self.growing):  # the constant parts refuse before anything is changed
            if part is not None:
                part.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        for part in self.parts.values():
            part.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for part in self.parts.values():
            part.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        for part in self.parts.values():
            part.batch_select_indices(indices)


class ConstantMixedCacheLayer(  # type: ignore[misc, override]
    MixedCacheLayer, LinearAttentionCacheLayerMixin, StaysOnDevice
):
    """Without a growing part; transformers leaves out of offloading what holds a state only."""

    # `Cache` reads these of every layer that claims to hold linear attention.
    number_of_states = 1

    def __init__(self, parts: dict[str, Any], growing: None = None) -> None:
        MixedCacheLayer.__init__(self, parts)

    @property
    def has_previous_state(self) -> dict[int, bool]:  # type: ignore[override]
        return {0: self.is_initialized}

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("update: no branch of this layer caches growing keys and values")

    update_conv_state = update
    update_recurrent_state = update


def mixed_cache_layer(
    cache: Cache, layer_idx: int, branches: Mapping[str, type[MixerCacheLayer] | None]
) -> MixedCacheLayer:
    """This layer's parts in `cache`; on first use they take the place of the key/value layer made for the index.

    Args:
        branches: the classes of their parts by name; None for the one, if any, whose keys and values the key/value
            layer is to hold.

    Raises:
        ValueError: the layer in the cache holds tokens that a layer of another kind has seen.
    """
    layer: Any = layer_at(cache, layer_idx)
    if getattr(layer, "owner", None) != MixedCacheLayer.owner:
        refuse_filled(layer, layer_idx, MixedCacheLayer.owner)
        growing = next((name for name, kind in branches.items() if kind is None), None)
        parts = {name: layer if kind is None else new_layer(cache, kind) for name, kind in branches.items()}
        layer = ConstantMixedCacheLayer(parts) if growing is None else MixedCacheLayer(parts, growing)
        cache.layers[layer_idx] = layer
    return layer
