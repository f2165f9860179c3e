"""One call of a layer: what it is given, what its steps hand on, and calls that can be taken back.

In the place of cos and sin, the layers of a model that reads further than its teacher get six or seven tensors, each
[B or 1, T, ...]. Windows never see a distance that the teacher was not trained on, but whole heads do, and sinks are as
far away as the text is long. So whole heads have positions of their own, and sinks are seen as from a bounded one:

    cos, sin                   the teacher's, for windows
    whole_cos, whole_sin       those of whole heads
    turn_cos, turn_sin         by which a query turns back from its position p to min(p, bound), before it meets sinks
    scale, or positions        of the queries of whole heads [B or 1, T], where their attention takes one

The caches hold keys as these rotate them. Nothing is rotated when they are read, but where distances are cut.

Shapes: B batch, T tokens, D head size; HQ, HK, HV heads of q, k and v, HO those of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from deltanet_hf.mixers.cache import history
from deltanet_hf.mixers.cache.argument import CACHE
from deltanet_hf.mixers.cache.state import MixerCacheLayer, State
from deltanet_hf.mixers.layer.layer_kind import PositionEmbeddings
from deltanet_hf.mixers.layer.masks import boundaries_in, padding_in

Angles = tuple[Tensor, ...]
"""See the module's docstring; cos and sin alone in a model that reads as far as its teacher."""


@dataclass(frozen=True)
class CacheView:
    """A server's part of a cache for one call of a layer, in the place of a cache among its arguments.

    Its sequences have no padding, so that the layer's number of tokens is theirs.

    Attributes:
        layer: has the tensors, and takes those after the call.
        state_indices: [B] int32, the rows of its tensors in which a step finds the B sequences, as for `packed_step_`;
            None for row b of sequence b.
        pages: [B, M] int32, the same of packed groups that lie in pages of their own.
        lengths: tokens of the sequences that begin in the one row of a call; each gets a row of the tensors.
    """

    layer: MixerCacheLayer
    state_indices: Tensor | None = None
    pages: Tensor | None = None
    lengths: Sequence[int] | None = None


@dataclass(frozen=True)
class LayerCall:
    """The arguments of a layer's call besides its input."""

    cache: MixerCacheLayer | None  # the layer's part of the cache
    padding: Tensor | None  # [B, T] bool, True at padding
    cu_seqlens: Tensor | None  # [N + 1] boundaries of packed sequences over the B*T tokens
    view: CacheView | None = None  # where a server keeps the sequences of the call
    prompt_length: Tensor | None = None  # [1] int64: as if the first tokens, as many, were all; what follows is padding

    @classmethod
    def of(
        cls,
        layer: Any,
        length: int,
        attention_mask: Tensor | None,
        cache: Cache | MixerCacheLayer | CacheView | None,
        cu_seq_lens_q: Tensor | None,
        padding: Tensor | None,
        prompt_length: Tensor | None = None,
    ) -> LayerCall:
        """A call of T = `length` tokens, from the arguments of the layer's forward.

        Raises:
            ValueError: a mask that cannot be read, packed sequences together with a cache, or a cache that a layer of
                another kind has filled.
        """
        boundaries = boundaries_in(cu_seq_lens_q, length, cache)
        view: CacheView | None = None
        if isinstance(cache, CacheView):
            view, cache = cache, cache.layer
        part = None if cache is None else layer.place_cache(cache)
        seen = 0 if part is None else part.get_seq_length()
        return cls(part, padding_in(attention_mask, padding, length, seen), boundaries, view, prompt_length)

    @property
    def state(self) -> State | None:
        """The state before the call; None before the first token."""
        return self.cache.state if self.cache is not None and self.cache.is_initialized else None

    @property
    def lengths(self) -> Sequence[int] | None:
        """Tokens of each packed sequence, where their states are wanted; else None."""
        return None if self.view is None or self.cu_seqlens is None else self.view.lengths

    @property
    def longest(self) -> int:
        """The most tokens of a packed sequence; 0 where `lengths` has none."""
        return max(self.lengths or (0,))

    @property
    def state_indices(self) -> Tensor | None:
        """[B] int32, as in `CacheView`."""
        return None if self.view is None else self.view.state_indices

    @property
    def pages(self) -> Tensor | None:
        """[B, M] int32, as in `CacheView`."""
        return None if self.view is None else self.view.pages

    @property
    def keep_state(self) -> bool:
        """Whether the state after the call is wanted."""
        return self.cache is not None

    def unwritten(self, x: Tensor) -> Tensor | None:
        """[B, T] bool, True at the tokens of x [B, T, ...] that leave a state alone; None if there are none."""
        if self.prompt_length is None:
            return self.padding
        return (torch.arange(x.shape[1], device=x.device) >= self.prompt_length).expand(x.shape[:2])

    @property
    def is_recorded(self) -> bool:
        """Whether the cache records its past: the layer returns `recorded` then."""
        return self.cache is not None and self.cache.record_past


class Projected(NamedTuple):
    """The result of `Mixer.project`: a layer's input and its projections, each [B, T, ...]; None for what it lacks."""

    x: Tensor  # [B, T, hidden], zeros at padding
    q: Tensor  # [B, T, HQ*D], through the learned norm
    k: Tensor  # [B, T, HK*D], through the learned norm
    v: Tensor  # [B, T, HV*D]
    gate: Tensor | None = None  # [B, T, HO, D], logits of the output gate
    a: Tensor | None = None  # [B, T, HV], logits of the decay: of `a_proj`
    b: Tensor | None = None  # [B, T, HV], logits of the write strength: of `b_proj`
    mixing_logits: Tensor | None = None  # [B, T, HQ], of the state's share of the output: the window's `share_proj`


class MixCall(NamedTuple):
    """The argument of `Mixer.mix`: the tokens of a call as the recurrence reads them, and the state before them."""

    q: Tensor  # [B, T, HQ, D], after convolution, rotation and activation
    k: Tensor  # [B, T, HK, D]
    v: Tensor  # [B, T, HV, D]
    gates: tuple[Tensor, ...]  # what `Mixer.gates` returned, each [B, T, ...]
    padding: Tensor | None = None  # [B, T] bool, True at padding, where the gates leave the state alone already
    state: State | None = None  # after the tokens before, by the names of `recurrent_shapes`; None for zeros
    keep_state: bool = False  # whether the state after the last token is wanted
    cu_seqlens: Tensor | None = None  # [N + 1] boundaries of sequences packed into one row (B = 1)

    @property
    def decodes(self) -> bool:
        """Whether this is one decoding step, for which the recurrence is the faster form."""
        return self.q.shape[1] == 1 and not torch.is_grad_enabled()

    def in_one_row(self) -> MixCall:
        """The rows of packed sequences one after the other, B = 1, as `cu_seqlens` counts their tokens."""

        def joined(x: Tensor) -> Tensor:
            return x.flatten(0, 1).unsqueeze(0)

        padding = None if self.padding is None else joined(self.padding)
        gates = tuple(map(joined, self.gates))
        q, k, v = joined(self.q), joined(self.k), joined(self.v)
        # By name, because torch.compile (2.11) cannot make again what `_replace` made.
        return MixCall(q, k, v, gates, padding, self.state, self.keep_state, self.cu_seqlens)


def recorded(
    layer: Any, call: LayerCall, hidden_states: Tensor, position_embeddings: tuple[Tensor, ...] | None
) -> Tensor:
    """A call of a layer, [B, T, hidden] -> [B, T, hidden], whose last tokens `MixerCacheLayer.crop` can take back.

    A long call is made in two, so that the inputs of a whole prompt are neither kept nor repeated.

    Args:
        layer: called, hooks included, by the names of attention's arguments; it returns its output, alone or first.
        position_embeddings: cos and sin, each [B, T, R] or [1, T, R]; None for a layer without them.
    """
    cache, padding, length = call.cache, call.padding, hidden_states.shape[1]
    assert cache is not None
    first = max(0, length - history.MOST_TAKEN_BACK)

    def run(cache: MixerCacheLayer, x: Tensor, start: int) -> Tensor:
        part = slice(start, start + x.shape[1])
        angles = None if position_embeddings is None else tuple(angle[:, part] for angle in position_embeddings)
        mask = None if padding is None else ~padding[:, part]
        recording, cache.record_past = cache.record_past, False
        try:
            output = layer(hidden_states=x, position_embeddings=angles, attention_mask=mask, **{CACHE: cache})
        finally:
            cache.record_past = recording
        return output if isinstance(output, Tensor) else output[0]

    outputs = [run(cache, hidden_states[:, :first], 0)] if first else []
    last = hidden_states[:, first:].clone() if first else hidden_states
    cache.remember(length - first, lambda held, tokens: run(held, last[:, :tokens], first))
    return torch.cat([*outputs, run(cache, last, first)], dim=1)


def whole_angles(angles: Angles) -> tuple[PositionEmbeddings, Tensor | None]:
    """Cos and sin of whole heads, and the last tensor [B or 1, T], if there is one."""
    first = 2 if len(angles) > 2 else 0
    return (angles[first], angles[first + 1]), angles[6] if len(angles) > 6 else None


def window_angles(
    angles: Angles, bound: int | None, cache: Any, length: int
) -> tuple[PositionEmbeddings, PositionEmbeddings | None]:
    """Cos and sin of a window, and those of the way back, which only texts beyond the bound need.

    Args:
        bound: the furthest position from which sinks are seen; None for any.
        cache: the layer's part of the cache before the call, or None.
        length: tokens of the call.
    """
    longest = 0 if cache is None else cache.get_seq_length()
    if cache is not None and cache.fixed:  # a captured step is replayed for all further tokens
        longest = cache.longest
    # The host does not know how long texts are in static caches.
    unknown = longest is None or isinstance(longest, Tensor)
    # A teacher's angles, by which layers are fitted and aligned, have no way back.
    is_beyond = bound is not None and len(angles) > 2 and (unknown or longest + length > bound)
    return (angles[0], angles[1]), (angles[4], angles[5]) if is_beyond else None
