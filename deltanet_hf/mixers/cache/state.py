"""The state of one layer, as a layer of transformers' `Cache`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from deltanet_hf.mixers.cache.history import MOST_TAKEN_BACK, History, PastCall
from deltanet_hf.mixers.cache.protocol import CacheLayer, State, TensorShape, leading

StaysOnDevice: Any = getattr(cache_utils, "DummyLayer", object)
"""A base of layers that an offloaded cache leaves on the device; before 5.24, linear attention was enough for that."""


class MixerCacheLayer(CacheLayer, LinearAttentionCacheLayerMixin, CacheLayerMixin, StaysOnDevice):
    """A mixer's state, of constant size, and the number of tokens it has seen.

    The layer counts tokens itself, so that models without any softmax layer know their position. While `record_past`
    is set, `crop` can take back the last tokens (`history.py`).
    """

    static_length = 0  # tokens of the static cache that it stands in, see `StaticMixerCacheLayer`
    is_croppable = True
    is_sliding = False
    is_compileable = False
    supports_early_init = False
    # `Cache` reads these of every layer that claims to hold linear attention.
    number_of_states = 1

    def __init__(self, owner: str | None = None) -> None:
        self.owner = owner  # the name of the kind of layer whose state it is
        self.keys = self.values = None
        self.is_initialized = False
        self.record_past = False
        self.history = History()
        self.fixed = False  # whether the tensors of `state` are changed in place, see `fix`
        self.longest: int | None = None  # while they are, the tokens that there will be at most, if that is known
        self.state: State = {}
        self.tokens_seen: int | Tensor = 0
        self.device: torch.device | None = None  # type: ignore[assignment]

    @property
    def has_previous_state(self) -> dict[int, bool]:  # type: ignore[override]
        return {0: self.is_initialized}

    @property
    def batch_size(self) -> int:
        return -1 if not self.state else next(iter(self.state.values())).shape[0]

    def advance(self, tokens: int, state: State) -> None:
        """Store the state after `tokens` more tokens, which may be `self.state` itself, changed in place."""
        self._store(state)
        self.device = next(iter(state.values())).device
        self.is_initialized = True
        self.count(tokens)

    def count(self, tokens: int) -> None:
        """Count tokens whose state is stored already; a captured step runs this once for all of its replays."""
        if not self.fixed:
            self.tokens_seen += tokens

    def _store(self, state: State) -> None:
        if self.fixed:
            self._copy_in_place(state)
        else:
            self.state = state

    @torch.no_grad()
    def _copy_in_place(self, state: State) -> None:
        for name, tensor in state.items():
            self.state[name].copy_(tensor)

    @property
    def may_change(self) -> bool:
        """Whether a decoding step may change the tensors of the state in place."""
        if torch.is_grad_enabled() or not self.state or not self.is_initialized:
            return False
        tensors = self.state.values()
        if any(tensor.requires_grad for tensor in tensors):
            return False
        # A state made in inference mode can only be changed there.
        in_inference = torch.compiler.is_compiling() or torch.is_inference_mode_enabled()
        return in_inference or not any(tensor.is_inference() for tensor in tensors)

    def tensors(self, window: int | None = None) -> State:
        return self.state

    def shapes(self, tokens: int) -> dict[str, TensorShape]:
        return {name: TensorShape(tuple(x.shape[1:]), x.dtype) for name, x in self.state.items()}

    def put(self, tensors: State, tokens: int) -> None:
        self.history.clear()
        self.written = None
        self.state = {name: tensor.clone() for name, tensor in tensors.items()}
        self.tokens_seen, self.is_initialized = tokens, bool(tensors)

    def snapshot(self) -> tuple[State, int]:
        return {name: tensor.clone() for name, tensor in self.state.items()}, int(self.tokens_seen)

    def rewind(self, contents: tuple[State, int]) -> None:
        self.put(*contents)

    def after(self, tokens: int, copied: Callable[[Tensor], Tensor]) -> MixerCacheLayer:
        made = copy.copy(self)
        made.history, made.tokens_seen = History(), tokens
        made.state = {name: copied(leading(self.state[name], one.shape)) for name, one in self.shapes(tokens).items()}
        return made

    def room(self, tokens: int, places: Callable[[int | None, Tensor], Any]) -> State:
        shapes = self.shapes(tokens)
        return {name: x.new_zeros(len(x), *shapes[name].shape) for name, x in self.state.items()}

    def fix(self, room: State, tokens: int, longest: int | None) -> MixerCacheLayer:
        for name, x in self.state.items():
            leading(room[name], x.shape[1:]).copy_(x)
        self.state, self.fixed, self.longest = room, True, longest
        return self

    def release(self, tokens: int, copied: bool) -> MixerCacheLayer:
        held = {name: leading(self.state[name], one.shape) for name, one in self.shapes(tokens).items()}
        if copied:
            held = {name: x.clone() for name, x in held.items()}
        self.state = {name: x.contiguous() for name, x in held.items()}
        self.fixed, self.tokens_seen = False, tokens
        return self

    def changed(self, number: int) -> Iterable[Tensor]:
        return self.state.values()

    def get_seq_length(self) -> int:
        return self.tokens_seen  # type: ignore[return-value]  # a tensor in static caches, as in transformers' own

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return int(self.tokens_seen) + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def reset(self) -> None:
        self.history.clear()
        for tensor in self.state.values():
            tensor.zero_()
        self.tokens_seen = 0
        self.written = None

    def remember(self, tokens: int, repeat: Callable[[Any, int], object]) -> None:
        """Keep a copy of the state before a call of `tokens` tokens; `repeat` is that of `PastCall`."""
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
                    "(place_layers in deltanet_hf.models.assisted, then cache.activate_past_recording()), which keeps "
                    f"the last {MOST_TAKEN_BACK} tokens: more candidates (prompt_lookup_num_tokens, "
                    "num_assistant_tokens) are too many"
                )
            with torch.inference_mode(call.inference), torch.set_grad_enabled(call.gradients):
                self.put(call.state, call.seen)
                if kept > call.seen:
                    call.repeat(self, kept - call.seen)
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
            "cache: a softmax layer was given the state of a converted layer; this cache belongs to another "
            "model, pass an empty one"
        )

    update_conv_state = update
    update_recurrent_state = update
