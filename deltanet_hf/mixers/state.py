"""The constant-size state of one layer, as a layer of transformers' `Cache`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, LinearAttentionCacheLayerMixin, StaticLayer

from deltanet_hf.mixers.history import History, PastCall

State = dict[str, Tensor]
"""The tensors that a mixer keeps between calls, by the names of its `state_shapes`; each begins with the batch."""

QUANTISED = ("_quantized_keys", "_quantized_values")  # where transformers' quantised layers keep them


class MixerCacheLayer(LinearAttentionCacheLayerMixin, CacheLayerMixin):
    """A mixer's state and the number of tokens it has seen.

    The layer counts tokens itself, so that models without any softmax layer know their position. Beside static
    key/value layers of `static_length` tokens it keeps its tensors (and the count, as a tensor) at fixed addresses, as
    compiled decoding requires, and asks for masks as wide as theirs. Where all of these have a sliding window, so that
    none has a place for every token, it asks for masks as they do. While `record_past` is set, `crop` can take back
    the last tokens (`history.py`).
    """

    is_croppable = True
    supports_early_init = False
    # `Cache` reads these of every layer that claims to hold linear attention.
    number_of_states = 1

    def __init__(self, static_length: int | None = None, owner: str | None = None, is_sliding: bool = False) -> None:
        self.is_sliding = is_sliding
        self.owner = owner  # the name of the kind of layer whose state it is
        self.keys = self.values = None
        self.is_initialized = False
        self.record_past = False
        self.history = History()
        self.static_length = static_length
        self.grows = False  # whether the tensors of `state` become larger with the tokens
        self.fixed = False  # whether the tensors of `state` are changed in place, see `fix`
        self.state: State = {}
        self.tokens_seen: int | Tensor = 0
        self.written: Tensor | None = None  # ids [B, T] of the first tokens, where `generate` knows them
        self.device: torch.device | None = None  # type: ignore[assignment]

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Only at fixed addresses: for such caches transformers makes a mask per step even where nothing is masked."""
        return self.static_length is not None

    @property
    def has_previous_state(self) -> dict[int, bool]:  # type: ignore[override]
        return {0: self.is_initialized}

    @property
    def batch_size(self) -> int:
        return -1 if not self.state else next(iter(self.state.values())).shape[0]

    def advance(self, tokens: int, state: State) -> None:
        """Store the state after `tokens` more tokens."""
        if self.static_length is not None or self.fixed:
            self._copy_in_place(state)
        else:
            self.state = state
        self.device = next(iter(state.values())).device
        self.is_initialized = True
        self.count(tokens)

    def count(self, tokens: int) -> None:
        """Count tokens whose state is stored already; a recorded step runs this once for all of its replays."""
        if not self.fixed:
            self.tokens_seen += tokens

    @torch.no_grad()
    def _copy_in_place(self, state: State) -> None:
        if not self.state:
            self.state = {name: torch.empty_like(tensor) for name, tensor in state.items()}
            device = next(iter(state.values())).device
            self.tokens_seen = torch.zeros((), dtype=torch.long, device=device)
            if not torch.compiler.is_compiling():
                for tensor in (*self.state.values(), self.tokens_seen):
                    torch._dynamo.mark_static_address(tensor)
        for name, tensor in state.items():
            self.state[name].copy_(tensor)

    def put(self, state: State, tokens_seen: int) -> None:
        """Go on from copies of this state and number of tokens; an empty state is that before the first token."""
        if self.static_length is None:
            self.history.clear()
            self.written = None
            self.state = {name: tensor.clone() for name, tensor in state.items()}
            self.tokens_seen, self.is_initialized = tokens_seen, bool(state)
            return
        self.reset()
        if state:
            self._copy_in_place(state)
            self.is_initialized = True
        self.tokens_seen += tokens_seen

    def fix(self, tensors: State) -> None:
        """Keep the state in `tensors`, which hold it already, until `release`; meanwhile tokens are not counted."""
        self.state, self.fixed = tensors, True

    def release(self, tokens_seen: int, copied: bool) -> None:
        """Leave the tensors of `fix` with their contents `copied`, or keep them as any others."""
        self.state = {name: tensor.clone() if copied else tensor for name, tensor in self.state.items()}
        self.fixed, self.tokens_seen = False, tokens_seen

    def get_seq_length(self) -> int:
        return self.tokens_seen  # type: ignore[return-value]  # a tensor in static caches, as in transformers' own

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length = self.static_length or 0
        if length and not self.is_sliding:
            return length, 0
        seen = int(self.tokens_seen)
        if self.is_sliding and seen >= length:
            return length + query_length - 1, seen - length + 1
        return max(length, seen + query_length), 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def reset(self) -> None:
        self.history.clear()
        for tensor in self.state.values():
            tensor.zero_()
        if isinstance(self.tokens_seen, Tensor):
            self.tokens_seen.zero_()
        else:
            self.tokens_seen = 0
        self.written = None

    def remember(self, tokens: int, repeat: Callable[[int], object]) -> None:
        """Keep a copy of the state before a call of `tokens` tokens; `repeat` makes the call for its first tokens."""
        state = {name: tensor.clone() for name, tensor in self.state.items()}
        self.history.add(PastCall(int(self.tokens_seen), state, repeat), tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens, given their number below 0, and forget what was recorded of earlier calls.

        Raises:
            ValueError: the tokens were not recorded.
        """
        if tokens_to_remove != 0:
            kept = int(self.tokens_seen) - abs(tokens_to_remove)
            call = self.history.last_before(kept)
            if call is None or self.history.end != int(self.tokens_seen):
                raise ValueError(
                    f"crop: cannot take back {abs(tokens_to_remove)} tokens, a recurrent state holds no history of "
                    "them; rewind to a snapshot (deltanet_hf.sessions), or record the past before they are read "
                    "(place_layers in deltanet_hf.models.assisted, then cache.activate_past_recording())"
                )
            with torch.inference_mode(call.inference), torch.set_grad_enabled(call.gradients):
                self.put(call.state, call.seen)
                if kept > call.seen:
                    call.repeat(kept - call.seen)
        self.history.clear()

    def _map_batch(self, function: Callable[[Tensor], Tensor]) -> None:
        self.history.clear()
        self.state = {name: function(tensor) for name, tensor in self.state.items()}
        self.written = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._map_batch(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_batch(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_batch(lambda tensor: tensor[indices])

    def offload(self) -> None:
        self._map_batch(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._map_batch(lambda tensor: tensor.to(self.device, non_blocking=True))

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("lazy_initialization: a converted layer stores its state with `advance`")

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "past_key_values: a softmax layer was given the state of a converted layer; this cache belongs to another "
            "model, pass an empty one"
        )

    update_conv_state = update
    update_recurrent_state = update


def cache_layer(cache: Cache | MixerCacheLayer, layer_idx: int, owner: str) -> MixerCacheLayer:
    """This layer's state in `cache`; on first use it takes the place of the key/value layer made for the index.

    A branch of a layer with mixed heads is handed its part of the layer's cache instead of a cache.

    Args:
        owner: the name of the kind of layer.

    Raises:
        ValueError: the layer in the cache holds tokens that a layer of another kind has seen.
    """
    if isinstance(cache, MixerCacheLayer):
        return cache
    while len(cache.layers) <= layer_idx:
        cache.layers.append((cache.layer_class_to_replicate or DynamicLayer)())
    layer = cache.layers[layer_idx]
    if not isinstance(layer, MixerCacheLayer):
        refuse_filled(layer, layer_idx, owner)
        layer = cache.layers[layer_idx] = layer_beside(cache, owner)
    elif layer.owner != owner:
        refuse_filled(layer, layer_idx, owner)
        layer.owner = owner
    return layer


def refuse_filled(layer: Any, layer_idx: int, owner: str) -> None:
    """Raises ValueError if a layer of a cache, which `owner` did not fill, holds tokens."""
    if isinstance(layer, CacheLayerMixin):
        held = layer.is_initialized and int(layer.get_seq_length()) > 0
    else:  # transformers' own states of linear attention
        held = any(layer.has_previous_state.values())
    if held:
        raise ValueError(
            f"past_key_values: layer {layer_idx} holds what a layer of another kind kept, which a {owner} layer cannot "
            "continue (PEFT's prefix tuning, or the cache of another model); train LoRA adapters instead, or pass an "
            "empty cache"
        )


def layer_beside(cache: Cache, owner: str | None = None) -> MixerCacheLayer:
    """An empty layer for `cache`, in the place of one of its layers or beside it.

    The length of a static cache is the longest of its layers: those with sliding windows are shorter than the sequence.
    """
    others = cache.layers
    lengths = [other.max_cache_len for other in others if isinstance(other, StaticLayer)]
    lengths += [getattr(other, "static_length", None) or 0 for other in others]
    if not any(lengths):
        return MixerCacheLayer(None, owner)
    return MixerCacheLayer(max(lengths), owner, all(getattr(other, "is_sliding", False) for other in others))


def cache_bytes(cache: Cache) -> int:
    """Bytes that a cache holds: the states of converted layers, the keys and values of the others."""
    return sum(_held_bytes(layer) for layer in cache.layers)


def _held_bytes(layer: Any) -> int:
    parts: dict[str, Any] | None = getattr(layer, "parts", None)
    if parts is not None:
        return sum(_held_bytes(part) for part in parts.values())
    if isinstance(layer, MixerCacheLayer):
        return _nbytes(layer.state)
    return sum(_nbytes(getattr(layer, name, None)) for name in ("keys", "values", *QUANTISED))


def _nbytes(held: Any) -> int:
    """Bytes of a tensor, or of all tensors inside a container or a quantised tensor."""
    if isinstance(held, Tensor):
        if not hasattr(held, "__tensor_flatten__"):
            return held.numel() * held.element_size()
        return sum(_nbytes(getattr(held, name)) for name in held.__tensor_flatten__()[0])
    inside = held.values() if isinstance(held, dict) else held if isinstance(held, (tuple, list)) else ()
    return sum(_nbytes(part) for part in inside)


def may_change(cache: MixerCacheLayer) -> bool:
    """Whether a fused decoding step may change the state of this cache in place."""
    if torch.is_grad_enabled() or not cache.state or not cache.is_initialized:
        return False
    tensors = cache.state.values()
    if any(tensor.requires_grad for tensor in tensors):
        return False
    # A state made in inference mode can only be changed there.
    in_inference = torch.compiler.is_compiling() or torch.is_inference_mode_enabled()
    return in_inference or not any(tensor.is_inference() for tensor in tensors)
