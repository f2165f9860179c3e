"""The decoding step of a model at one batch size, its tensors at addresses that stay, and its graph.

The layers of a cache come in here for the length of one `generate` call, each into the room that its class makes
(`CacheLayer.room`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from deltanet_hf.decoding.capture import CAPTURES, CapturedGraph
from deltanet_hf.fast import FastDecoder
from deltanet_hf.mixers.attention.single_query import SINGLE_QUERY, attending_by
from deltanet_hf.mixers.cache.argument import CACHE
from deltanet_hf.mixers.cache.key_values import as_cache_layer
from deltanet_hf.mixers.cache.protocol import CacheLayer
from deltanet_hf.mixers.cache.static_key_values import Places
from deltanet_hf.mixers.layer.masks import NO_PADDING, sliding_window

SPARE = 256  # places beyond the tokens of a cache, at least; otherwise an eighth of the tokens
ALIGNMENT = 64  # of the number of places
MASKED = ("full_attention", "sliding_attention", "linear_attention")  # kinds of layers whose masks are known here


class NotCapturable(Exception):
    """Why a step cannot be captured, in words that follow a colon."""


def layout(cache: Cache, config: PreTrainedConfig) -> tuple[Any, ...]:
    """Shapes and dtypes of a cache that holds tokens, but for their number.

    Raises:
        NotCapturable: it has layers whose tensors cannot stay where they are.
    """
    if cache.offloading:
        raise NotCapturable("the cache is offloaded")
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in MASKED:
            raise NotCapturable(f"layers of the kind {kind} have masks of their own")
    return tuple(_layer_layout(layer, index, config) for index, layer in enumerate(map(as_cache_layer, cache.layers)))


def _layer_layout(layer: CacheLayer, index: int, config: PreTrainedConfig) -> tuple[Any, ...]:
    if layer.unmovable is not None:
        raise NotCapturable(f"layer {index} of the cache is a {layer.unmovable}")
    if layer.batch_size < 0:
        raise NotCapturable(f"layer {index} of the cache is empty")
    if not layer.fits_window(sliding_window(config, index)):
        raise NotCapturable(f"layer {index} of the cache has another window than the model")
    return (layer.batch_size, *layer.shapes(0).items())


def capacity_for(tokens: int, longest: int) -> int:
    """Places for a cache of so many tokens, of which there will be `longest` at most."""
    wanted = min(tokens + max(SPARE, tokens // 8), max(longest, tokens))
    return -(-wanted // ALIGNMENT) * ALIGNMENT


class StaticCacheBuffers:
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
        self._mask_dtype = mask_dtype
        layers = [as_cache_layer(layer) for layer in cache.layers]
        self._rooms = [layer.room(capacity, self._places_of) for layer in layers]
        self._unbounded = any(layer.grows for layer in layers)
        device = next(iter(layers[-1].tensors().values())).device
        self._count = torch.zeros(1, dtype=torch.long, device=device)
        self.mask = self._masks(config, device)

    def _places_of(self, window: int | None, keys: Tensor) -> Places:
        """The places of all layers with this window, for as many sequences as keys [B, H, S, D] has."""
        if window not in self._places:
            self._places[window] = Places(len(keys), window, self.capacity, self._mask_dtype, keys.device)
        return self._places[window]

    @property
    def grows(self) -> bool:
        """Whether it holds keys and values of all tokens or of a family's own sliding window."""
        return bool(self._places) or self._unbounded

    @property
    def full(self) -> bool:
        """Whether there is no place for a further token."""
        sliding = (places for window, places in self._places.items() if window is not None)
        bounded = self._unbounded or any(places.size < places.window for places in sliding)  # type: ignore[operator]
        return bounded and self._seen >= self.capacity

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
        pairs = zip(cache.layers, self._rooms, strict=True)
        longest = self.capacity if self.grows else None
        cache.layers[:] = [as_cache_layer(layer).fix(room, seen, longest) for layer, room in pairs]

    def unload(self, cache: Cache, copied: bool = True) -> None:
        """Give the cache back its own layers; their states are `copied`, or this object's tensors."""
        cache.layers[:] = [as_cache_layer(layer).release(self._seen, copied) for layer in cache.layers]

    def enter(self) -> None:
        """The step's first work on the device: the next token gets its places."""
        for places in self._places.values():
            places.enter(self._count)
        if self._places:
            self._count.add_(1)

    @contextmanager
    def taken_back(self, cache: Cache) -> Iterator[None]:
        """Take back the step that is run in here, on the cache that was brought in, without padding."""
        changed = [x for layer in cache.layers for x in as_cache_layer(layer).changed(self._seen)]
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


class CapturedStep:
    """One step, with fixed addresses for everything that it reads and writes.

    Args:
        model: the model; it is not kept.
        cache: of the batch, for its shapes.
        inputs: of the model's forward: `input_ids` [B, 1] and `position_ids`.
        capacity: see `StaticCacheBuffers`.
        key: of everything that the graph depends on beside the number of tokens.
        form: the fast form of the model.
    """

    def __init__(
        self,
        model: Any,
        cache: Cache,
        inputs: dict[str, Any],
        capacity: int,
        key: Any,
        form: FastDecoder,
    ) -> None:
        self.key, self.batch = key, len(inputs["input_ids"])
        self._form = form
        self._ids, self._positions = (torch.empty_like(inputs[name]) for name in ("input_ids", "position_ids"))
        eager = model.config._attn_implementation == "eager"
        dtype = model.get_input_embeddings().weight.dtype if eager else torch.bool
        self.buffers = StaticCacheBuffers(cache, model.config, capacity, dtype)
        self._graph: CapturedGraph | None = None

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def set_inputs(self, inputs: dict[str, Any]) -> None:
        self._ids.copy_(inputs["input_ids"])
        self._positions.copy_(inputs["position_ids"])

    def run(self, model: Any, cache: Cache) -> Tensor:
        """The step on the inputs that were set, as separate launches: logits [B, 1, vocabulary]."""
        self.buffers.enter()
        with attending_by(model.config, SINGLE_QUERY):
            logits: Any = self._form(
                model,
                input_ids=self._ids,
                position_ids=self._positions,
                attention_mask=self.buffers.mask,
                padding=NO_PADDING,  # generated tokens are none
                use_cache=True,
                return_dict=True,
                **{CACHE: cache},
            ).logits
        return logits  # type: ignore[no-any-return]

    def capture(self, model: Any, cache: Cache) -> None:
        """Capture `run` without changing the cache."""
        device = self._ids.device
        self._graph = CAPTURES[device.type](lambda: self.run(model, cache), device)

    def replay(self) -> Tensor:
        """As `run`; the next call overwrites the result."""
        assert self._graph is not None
        self._graph.replay()
        return self._graph.output
