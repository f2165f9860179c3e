"""Softmax attention over packed keys and values by few launches, for known families: decoding steps and prompts.

It stands for a whole layer, for a window, and for mixed heads: one product projects the input for all heads, and three
or four kernels follow for each kind of heads, both kinds at the same time. In a step, one rotates queries and keys and
puts the token into the cache, and two attend; of a prompt without padding, one rotates, one rounds to 8 bits, one packs
and one attends.
mixers/attention/packed_softmax.py and mixers/window.py say what is computed; all other calls go to them. Mixed heads
may have states of what has left their windows, by `delayed.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from deltanet_hf.fast.delayed import FastDelayedRule
from deltanet_hf.fast.families import family_of
from deltanet_hf.fast.parts import MergedProjection, fast_norms, with_children
from deltanet_hf.fast.softmax import QKV
from deltanet_hf.mixers.attention.far_positions import FarSoftmax
from deltanet_hf.mixers.attention.packed_softmax import PackedSoftmax
from deltanet_hf.mixers.attention.paired_class import behind
from deltanet_hf.mixers.cache.argument import given_cache
from deltanet_hf.mixers.cache.quantised_kv_cache import QuantisedKVCache
from deltanet_hf.mixers.cache.state import MixerCacheLayer, State
from deltanet_hf.mixers.layer.layer_call import Angles, LayerCall, whole_angles, window_angles
from deltanet_hf.mixers.layer.layer_kind import branches_of
from deltanet_hf.mixers.layer.masks import boundaries_in, padding_in
from deltanet_hf.mixers.layer.mixer import Mixer
from deltanet_hf.mixers.window import WindowAttention
from deltanet_kernels import prompt_inputs
from deltanet_kernels.common.device import two_streams
from deltanet_kernels.prompt.calls import PromptInputsCall


def is_packed(attention: Any) -> bool:
    """Whether `FastPacked` computes it: softmax or windows of known families, and mixed heads of these and of states
    that `FastDelayedRule` serves, all with a cache in 8 or 4 bits."""
    return all(map(_is_known, branches_of(attention).values()))


def _is_known(branch: Any) -> bool:
    if isinstance(branch, Mixer):
        return FastDelayedRule.serves(branch)
    kind: Any = type(branch).__bases__[1] if isinstance(branch, (PackedSoftmax, WindowAttention)) else object
    family = family_of(behind(FarSoftmax, kind), "Attention")
    if family is None or not family.plain_attention:
        return False
    return branch.cache_bits in (8, 4) and type(branch.o_proj) is nn.Linear


class FastPacked:
    """Stands for the attention in calls without gradients, with the signature of its forward.

    Args:
        plain: the attention, which computes all other calls.
        may_move: whether its weights may be moved, see `MergedProjection`.
    """

    takes_prompt_length = True

    def __init__(self, plain: Any, may_move: bool) -> None:
        self._plain, branches = plain, branches_of(plain).values()
        self._heads = [_heads(one) for one in branches]
        self._output_layers = [one.o_proj for one in branches]
        linears = [linear for heads in self._heads for linear in heads.readers if linear is not None]
        self._project = MergedProjection(linears, may_move)

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: Angles,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        cu_seq_lens_q: Tensor | None = None,
        padding: Tensor | None = None,
        prompt_length: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """As the attention's forward; `prompt_length` as in `FastDecoder`."""
        length = hidden_states.shape[1]
        cache = given_cache(past_key_values, kwargs)
        parts = self._parts(cache)
        if parts and all(part is None or _is_simple(part, length) for part in parts):
            seen = 0 if parts[0] is None else parts[0].get_seq_length()
            masked = padding_in(attention_mask, padding, length, seen)
            if masked is None and boundaries_in(cu_seq_lens_q, length, parts[0]) is None:
                return self._output(hidden_states, position_embeddings, parts, prompt_length), None
        return self._plain(  # type: ignore[no-any-return]
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=cache,
            cu_seq_lens_q=cu_seq_lens_q,
            padding=padding,
            **kwargs,
        )

    def _parts(self, cache: Any) -> Sequence[MixerCacheLayer | None]:
        """The layer's part of a cache, or None without one, for each branch; empty if the cache is of another kind."""
        if cache is None:
            return [None] * len(self._heads)
        own = self._plain.place_cache(cache)
        parts = list(getattr(own, "parts", {"": own}).values())
        fit = all(part.unmovable is None and (not part.state or "key_codes" in part.state) for part in parts)
        return parts if fit else []

    def _output(
        self,
        x: Tensor,
        angles: Angles,
        parts: Sequence[MixerCacheLayer | None],
        prompt_length: Tensor | None,
    ) -> Tensor:
        """A prompt or one more token, x [B, T, hidden] -> [B, T, hidden].

        The parts of the cache take a token in place; heads without a window get larger tensors every 32 tokens.
        """
        outputs = iter(self._project(x))
        calls = []
        for heads, part in zip(self._heads, parts, strict=True):
            own = [None if linear is None else next(outputs) for linear in heads.readers]
            calls.append(functools.partial(heads.attend, x, own, part, angles, prompt_length))
        attended = []
        for part, (output, state) in zip(parts, two_streams(calls, x.device), strict=True):
            attended.append(output.flatten(2))
            if part is not None:
                part.advance(x.shape[1], state)
        first, *others = self._output_layers
        total: Tensor = first(attended[0])
        for layer, one in zip(others, attended[1:], strict=True):
            total.flatten(0, 1).addmm_(one.flatten(0, 1), layer.weight.t())  # no bias: head_split.py
        return total


class _Heads(NamedTuple):
    """One kind of heads."""

    readers: Sequence[nn.Module | None]
    """The linear layers that read the input; None for one that a mixer lacks."""
    attend: Callable[..., tuple[Tensor, State]]
    """The attention [B, T, heads, D], and the new state, of the input, the outputs of `readers`, cache, angles and
    prompt length."""


def _heads(branch: Any) -> _Heads:
    if isinstance(branch, Mixer):
        return _Heads(branch.readers, functools.partial(_state_attention, FastDelayedRule.of(branch, may_move=False)))
    readers = [getattr(branch, name) for name in QKV]
    return _Heads(readers, functools.partial(_softmax_attention, with_children(branch, **fast_norms(branch))))


def _is_simple(part: MixerCacheLayer, length: int) -> bool:
    """Whether a call of `length` tokens is the first, or a step that may change the part in place."""
    return not part.record_past and (part.may_change if length == 1 else not part.is_initialized)


def _state_attention(
    branch: FastDelayedRule,
    x: Tensor,
    outputs: Sequence[Tensor | None],
    cache: MixerCacheLayer | None,
    angles: Angles,
    prompt_length: Tensor | None,
) -> tuple[Tensor, State]:
    """Window and state of one kind of heads."""
    call = LayerCall(cache, None, None, None, prompt_length)
    return branch.attend(branch.projected(x, outputs), angles, call)


def _softmax_attention(
    branch: Any,
    x: Tensor,
    outputs: Sequence[Tensor],
    cache: MixerCacheLayer | None,
    angles: Angles,
    prompt_length: Tensor | None,
) -> tuple[Tensor, State]:
    """Softmax attention of one kind of heads, from the projections of x for q, k and v."""
    q, k, v = (y.unflatten(-1, (-1, branch.head_dim)) for y in outputs)
    norms = (getattr(branch, name, None) for name in ("q_norm", "k_norm"))
    q, k = (y if norm is None else norm(y) for norm, y in zip(norms, (q, k), strict=True))
    scale = turn = None
    if isinstance(branch, WindowAttention):
        angles, turn = window_angles(angles, branch.sink_bound, cache, q.shape[1])
    else:
        angles, scale = whole_angles(angles)
    if scale is not None:
        q = (q * scale[:, :, None, None]).to(q.dtype)
    if cache is not None and cache.state:
        seen = int(cache.get_seq_length())
        held = QuantisedKVCache(branch.cache_spec, cache.state, None, seen, in_place=True, turn=turn)
        output, _ = held.step(q, k, v, branch.scaling, None, *angles)
        return output, held.state
    call = PromptInputsCall(q.flatten(-2), k.flatten(-2), v.flatten(-2), branch.head_dim, cos=angles[0], sin=angles[1])
    rotated = prompt_inputs.unchecked(call)
    kept = cache is not None
    held = QuantisedKVCache(branch.cache_spec, {}, None, keep_state=kept, prompt_length=prompt_length, turn=turn)
    output, _ = held.attend(rotated.q, rotated.k, rotated.v, branch.scaling, None)
    return output, held.state
