"""The packed keys and values of a layer, and the attention of a call to them.

Keys are quantised per channel over groups of 32 tokens, because a few channels of all keys are large, and values per
token over groups of 32 channels (KIVI, arXiv 2402.02750), on even steps that reach from the lowest to the highest
number of a group. Before that, each token is rounded to 8 bits, with a scale for 16 channels that is a power of two
(`PackedKeyValues`). A query sees its own group of tokens, and the first four tokens, in these 8 bits, and the packed
form of earlier groups. So what it sees depends on its sequence only, and not on how it was cut into calls. Gradients
pass the rounding unchanged (straight-through), so that a model can be trained through its cache.

Tokens are counted without padding. A window keeps the groups that its next query may see, as a ring; otherwise all
groups are kept.

A call is computed in one of four ways:

    a step       one further token per sequence, without padding        `packed_step_`
    a prompt     whole sequences without padding, or in one row         `pack_prompt`, `prompt_attention`
    a part       several further tokens, without padding; and whole     `packed_part`
                 sequences of which sinks do not stay in sight
    any other    padding                                                `attention_by_numbers`

Shapes: B batch, T tokens of a call, HQ and HK query and key/value heads, D head size, N packed groups, L places of the
groups that a call reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.cache.protocol import TensorShape
from deltanet_hf.mixers.cache.quantised_cache_spec import NAMES, PACKED, QuantisedCacheSpec, groups_before
from deltanet_hf.mixers.cache.sinks_apart import Scores, leaves_out, with_sinks
from deltanet_hf.mixers.cache.state import MixerCacheLayer, State
from deltanet_hf.mixers.cache.window_cache import Tokens
from deltanet_kernels import PackedKeyValues, pack_prompt, packed_part, packed_step_, prompt_attention, round_tokens
from deltanet_kernels.common.rotation import turned
from deltanet_kernels.packed_cache.arranged import attention_by_numbers
from deltanet_kernels.packed_cache.calls import (
    PackedPartCall,
    PackedStepCall,
    PackPromptCall,
    PromptAttentionCall,
    RoundTokensCall,
)
from deltanet_kernels.packed_cache.layout import GROUP, PACKED_BITS, SINKS, quantised, restored, tokens_of


class PackedCacheLayer(MixerCacheLayer):
    """The layer of a cache that keeps all tokens: a state to which every group of tokens adds its packed form."""

    grows = True

    def shapes(self, tokens: int) -> dict[str, TensorShape]:
        shapes = super().shapes(tokens)
        for name in PACKED:
            heads, _, *group = shapes[name].shape
            shapes[name] = TensorShape((heads, groups_before(tokens), *group), shapes[name].dtype)
        return shapes


class QuantisedKVCache:
    """Stands for the cache in one call of the family's attention, which then calls `attend`.

    Args:
        spec: what is kept.
        state: the tensors before the call; empty before the first token.
        padding: [B, T] bool, True at padding; None for none.
        seen: tokens before the call, padding included; 0 for a cache whose number of groups is fixed.
        keep_state: whether the state after the call is wanted.
        in_place: whether a single token may be put into the tensors of `state`.
        lengths: of the sequences packed into the one row of the call, which begin in it; None for one per row.
        cu_seqlens: their boundaries.
        state_indices, pages: with `in_place`, the rows [B] and [B, M] int32 of the tensors of `state` that hold the
            sequences, as for `packed_step_`.
        prompt_length: [1] int64, the tokens of a prompt that are kept, see `pack_prompt`; all by default.
        turn: cos and sin [B or 1, T, R] by which queries turn back before they meet the sinks outside of their window
            (`sinks_apart.py`); None where sinks are seen as other tokens.

    `state` is that after the call, once `attend` has been called, and `seen` then has the keys and values of a part as
    later groups see them (the last results of `packed_part`).
    """

    def __init__(
        self,
        spec: QuantisedCacheSpec,
        state: State,
        padding: Tensor | None,
        seen: int = 0,
        keep_state: bool = True,
        in_place: bool = False,
        lengths: Sequence[int] | None = None,
        state_indices: Tensor | None = None,
        pages: Tensor | None = None,
        prompt_length: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        turn: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.spec, self.state, self._padding, self._seen = spec, state, padding, seen
        self._keep_state, self._in_place, self._lengths = keep_state, in_place, lengths
        self._state_indices, self._pages = state_indices, pages
        self._prompt_length, self._cu_seqlens, self._turn = prompt_length, cu_seqlens, turn
        self.seen: tuple[Tensor, Tensor] | None = None

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The keys and values of the call alone; `attend` puts them into the state."""
        return keys, values

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
        """Attention [B, T, HQ, D] of q [B, T, HQ, D] to k, v [B, T, HK, D] and the tokens before them, and its
        log-sum-exp [B, T, HQ].

        Raises:
            ValueError: gradients of another call than a prompt.
            UserError: bits without a packed form, where one is needed.
        """
        spec, turn = self.spec, self._turn
        if turn is None or (self._padding is None and self.state and q.shape[1] == 1):  # a step turns queries itself
            return self._attend(spec, q, k, v, scale, softcap)
        assert spec.window is not None
        tokens = Tokens.of(len(q), q.shape[1], self._padding, None, self.state.get("count"), q.device)
        near, lse = self._attend(replace(spec, sinks=0), q, k, v, scale, softcap)
        keys, values = (x[:, : spec.sinks] for x in self._first(k, v))
        seen = leaves_out(tokens.numbers, keys.shape[1], spec.window, spec.edge)
        return with_sinks(near, lse, turned(q, turn), keys, values, seen, Scores(scale, softcap))

    def _attend(
        self, spec: QuantisedCacheSpec, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """As `attend`, of a cache with `spec`; but for a step, sinks are seen as other tokens."""
        length = q.shape[1]
        longest = length if self._lengths is None else max(self._lengths)
        whole = self._padding is None and not self.state and (self._lengths is None or not torch.is_grad_enabled())
        if spec.bits not in PACKED_BITS and (self._keep_state or not whole):
            raise UserError(
                f"cache bits: {spec.bits} bits are computed for whole sequences without a cache, to measure them, and "
                f"have no packed form; use {' or '.join(map(str, PACKED_BITS))}"
            )
        if whole and (spec.family_window is None or spec.sinks == 0 or longest <= spec.family_window):
            return self._prompt(spec, q, k, v, scale, softcap, longest)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            raise ValueError(
                "cache bits: gradients need whole sequences without padding, and no sinks in a window within the "
                "family's own; train with set_cache_bits(model, 16), or compute under torch.no_grad()"
            )
        if self._padding is None and self.state and length == 1:
            return self.step(q, k, v, scale, softcap)
        k, v = round_tokens.unchecked(RoundTokensCall(k, v))
        old = self.cache_before(k)
        groups, reach = spec.groups(self._seen + longest), (spec.window, spec.sinks, spec.family_window)
        call = PackedPartCall(q, k, v, old, groups, *reach, scale, softcap, self._cu_seqlens, longest, spec.edge)
        if self._padding is None:
            o, lse, cache, *seen = packed_part.unchecked(call)
        else:
            tokens = Tokens.of(len(q), length, self._padding, None, old.lengths.long(), q.device)
            o, lse, cache, *seen = attention_by_numbers(call, tokens.numbers.long() - 1)
        self.state, self.seen = dict(zip(NAMES, cache.tensors, strict=True)), (seen[0], seen[1])
        return o, lse

    def cache_before(self, k: Tensor) -> PackedKeyValues:
        """The cache before `attend`, for keys as in k [B, T, HK, D]."""
        return self._cache(self.state) if self.state else self._empty(k)

    def _cache(self, state: State) -> PackedKeyValues:
        return PackedKeyValues(*(state[name] for name in NAMES), self.spec.key_order)  # type: ignore[call-arg]

    def _empty(self, k: Tensor) -> PackedKeyValues:
        """The cache before the first token, for keys as in k [B, T, HK, D]."""
        batch = len(k) if self._lengths is None else len(self._lengths)
        heads, size = k.shape[2:]
        shapes = self.spec.shapes(heads, size, 0)
        return self._cache({name: k.new_zeros(batch, *one.shape, dtype=one.dtype) for name, one in shapes.items()})

    def _first(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the first tokens [B, S, HK, D], in 8 bits, after the call."""
        if not self.state:  # a text that is read without a cache
            return round_tokens.unchecked(RoundTokensCall(k[:, :SINKS], v[:, :SINKS]))
        cache = self._cache(self.state)
        first = {name: getattr(cache, name)[:, :, :SINKS] for name in ("keys", "values", "token_scales")}
        keys, values = tokens_of(cache._replace(**first), k.dtype)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def _prompt(
        self,
        spec: QuantisedCacheSpec,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        softcap: float | None,
        longest: int,
    ) -> tuple[Tensor, Tensor]:
        """`_attend` of whole sequences without padding, of so many tokens at most."""
        row = self._cu_seqlens, longest
        k, v, seen, self.state = quantised_prompt(spec, k, v, self._keep_state, self._prompt_length, *row)
        window = q.shape[1] if spec.window is None else spec.window
        call = PromptAttentionCall(q, k, v, *seen, window, spec.sinks, scale, softcap, spec.edge, *row)
        return prompt_attention.unchecked(call)

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        softcap: float | None,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`attend` of one further token without padding or gradients.

        With cos and sin [B or 1, 1, R], q and k are rotated first.
        """
        spec, state = self.spec, self.state
        if not self._in_place:
            state = {name: tensor.clone() for name, tensor in state.items()}
        _widen(state, spec.groups(self._seen + 1))
        cache = self._cache(state)
        self.state = state
        reach = spec.window, spec.sinks, spec.family_window
        places = self._state_indices, self._pages
        turn = self._turn or (None, None)
        call = PackedStepCall(q, k, v, cache, *reach, scale, softcap, cos, sin, *places, spec.edge, *turn)
        return packed_step_.unchecked(call)


def quantised_prompt(
    spec: QuantisedCacheSpec,
    k: Tensor,
    v: Tensor,
    keep_state: bool,
    prompt_length: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    longest: int = 0,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], State]:
    """Keys and values k, v [B, T, HK, D] of whole sequences without padding, as queries see them.

    Args:
        keep_state, prompt_length: as of `QuantisedKVCache`; bits without a packed form keep no state.
        cu_seqlens, longest: as for `pack_prompt`.

    Returns:
        k and v in 8 bits, as queries of the same group see them; both as those of later groups do, [B, N * 32, HK, D]
        of the N groups before the last token (with `cu_seqlens` [1, T, HK, D]); and the tensors of the cache, if they
        are kept.
    """
    k, v = round_tokens.unchecked(RoundTokensCall(k, v))
    if spec.bits not in PACKED_BITS:
        return k, v, (_seen_keys(k.detach(), spec.bits), _seen_values(v.detach(), spec.bits)), {}
    groups = spec.groups(k.shape[1] if cu_seqlens is None else longest)
    rest = spec.bits, groups, prompt_length, spec.key_order, cu_seqlens, longest
    cache, keys, values = pack_prompt.unchecked(PackPromptCall(k.detach(), v.detach(), *rest))
    return k, v, (keys, values), dict(zip(NAMES, cache.tensors, strict=True)) if keep_state else {}


def straight_through(x: Tensor, seen: Tensor) -> Tensor:
    """x [B, T, HK, D] with the numbers of `seen` [B, N * 32, HK, D] where it reaches, and gradients of x."""
    return x + F.pad(seen - x[:, : seen.shape[1]].detach(), (0, 0, 0, 0, 0, x.shape[1] - seen.shape[1]))


def fake_quantised(x: Tensor, bits: int) -> Tensor:
    """The numbers x [..., G] as `packed_cache.layout` stores and restores them in `bits` bits."""
    return restored(*quantised(x, bits), bits, x.dtype)


def _seen_keys(k: Tensor, bits: int) -> Tensor:
    groups = k[:, : (k.shape[1] - 1) // GROUP * GROUP].unflatten(1, (-1, GROUP)).transpose(2, -1)
    return _with_sinks(k, fake_quantised(groups, bits).transpose(2, -1).flatten(1, 2))  # from [B, N, D, HK, 32]


def _seen_values(v: Tensor, bits: int) -> Tensor:
    groups = v[:, : (v.shape[1] - 1) // GROUP * GROUP].unflatten(-1, (-1, min(GROUP, v.shape[-1])))
    return _with_sinks(v, fake_quantised(groups, bits).flatten(-2))


def _with_sinks(x: Tensor, rounded: Tensor) -> Tensor:
    """The rounded numbers of [B, N * 32, HK, D], of sinks those of x."""
    return torch.cat([x[:, : min(SINKS, rounded.shape[1])], rounded[:, SINKS:]], dim=1)


def _widen(state: State, groups: int) -> None:
    """Give the state places for so many groups, if it has fewer."""
    more = groups - state["key_codes"].shape[2]
    if more > 0:
        for name in PACKED:
            state[name] = F.pad(state[name], (*[0, 0] * (state[name].dim() - 3), 0, more))
