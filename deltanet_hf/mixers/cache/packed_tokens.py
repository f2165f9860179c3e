"""The packed keys and values of a layer, and the attention of a call to them.

It computes what `fake_quantisation.py` defines: a query sees its own group of 32 tokens and the first four tokens as
they are, and the packed form of earlier groups, whatever the calls were in which the tokens came. Tokens are counted
without padding. A window keeps the groups that its next query may see, as a ring; otherwise all groups are kept.

Shapes: B batch, T tokens of a call, HQ and HK query and key/value heads, D head size, N packed groups, L places of the
groups that a call reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.cache.fake_quantisation import quantised_attention
from deltanet_hf.mixers.cache.state import State, TensorShape
from deltanet_hf.mixers.cache.window_cache import Tokens
from deltanet_kernels import PackedKeyValues, pack_groups, pack_prompt, packed_step_
from deltanet_kernels.packed_cache.calls import PackPromptCall
from deltanet_kernels.packed_cache.layout import GROUP, SINKS, unpacked

NAMES = ("key_codes", "key_scales", "value_codes", "value_scales", "keys", "values", "count")
PACKED = NAMES[:4]  # those with a dimension of groups, the third
MOST_SCORES = 2**24  # that a call holds at a time


@dataclass(frozen=True)
class Kept:
    """The part of a sequence that a cache keeps, and the part of that which a query sees.

    Attributes:
        bits: 8 or 4; others can be computed, but have no packed form.
        window: the most recent tokens that a query sees, itself included; None for all.
        sinks: the first tokens, at most 4, that it sees behind the window too.
        limit: the family's own window, outside of which sinks are not seen either.
    """

    bits: int
    window: int | None
    sinks: int = 0
    limit: int | None = None

    @classmethod
    def of(cls, bits: int, window: int | None, sinks: int, limit: int | None) -> Kept:
        """A window within the family's own `limit`.

        Raises:
            UserError: more sinks than stay as they are.
        """
        if limit is not None and (window is None or limit <= window):
            return cls(bits, limit)
        if sinks > SINKS:
            raise UserError(
                f"cache bits: got {sinks} sinks, of which a cache of {bits} bits keeps {SINKS}; use 16 bits"
            )
        return cls(bits, window, sinks, limit)

    def groups(self, tokens: int) -> int:
        """N: the packed groups after `tokens` tokens."""
        return max(0, tokens - 1) // GROUP if self.window is None else -(-(self.window - 1) // GROUP)

    def shapes(self, heads: int, size: int, tokens: int, dtype: torch.dtype) -> dict[str, TensorShape]:
        """The tensors of one sequence after `tokens` tokens."""
        groups, parts = self.groups(tokens), max(1, size // GROUP)
        exact = TensorShape((heads, SINKS + GROUP, size), dtype)
        return {
            "key_codes": TensorShape((heads, groups, GROUP, size * self.bits // 8), torch.uint8),
            "key_scales": TensorShape((heads, groups, 2, size), torch.bfloat16),
            "value_codes": TensorShape((heads, groups, size, GROUP * self.bits // 8), torch.uint8),
            "value_scales": TensorShape((heads, groups, 2, parts, GROUP), torch.bfloat16),
            "keys": exact,
            "values": exact,
            "count": TensorShape((), torch.int32),
        }


class PackedTokens:
    """Stands for the cache in one call of the family's attention, which then calls `attend`.

    Args:
        kept: what is kept.
        state: the tensors before the call; empty before the first token.
        padding: [B, T] bool, True at padding; None for none.
        seen: tokens before the call, padding included.
        keep_state: whether the state after the call is wanted.
        in_place: whether a single token may be put into the tensors of `state`.

    `state` is that after the call, once `attend` has been called.
    """

    def __init__(
        self,
        kept: Kept,
        state: State,
        padding: Tensor | None,
        seen: int = 0,
        keep_state: bool = True,
        in_place: bool = False,
    ) -> None:
        self.kept, self.state, self._padding, self._seen = kept, state, padding, seen
        self._keep_state, self._in_place = keep_state, in_place

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The keys and values of the call alone; `attend` puts them into the state."""
        return keys, values

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
        """Attention [B, T, HQ, D] of q [B, T, HQ, D] to k, v [B, T, HK, D] and the tokens before them, and its
        log-sum-exp [B, T, HQ]."""
        kept, length = self.kept, q.shape[1]
        if self._padding is None and self.state and length == 1:
            return self.step(q, k, v, scale, softcap)
        whole = self._padding is None and not self.state
        if whole and (kept.limit is None or kept.sinks == 0 or length <= kept.limit):
            return self._whole(q, k, v, scale, softcap)
        if torch.is_grad_enabled() and k.requires_grad:
            raise ValueError(
                "cache bits: gradients need whole sequences without padding; train with set_cache_bits(model, 16), or "
                "compute under torch.no_grad()"
            )
        arranged = _Arranged.of(kept, self.state, k.detach(), v.detach(), self._padding)
        self.state = arranged.state(kept.groups(self._seen + length))
        return arranged.attend(q, kept, scale, softcap)

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
        """`attend` of whole sequences without padding."""
        kept, length = self.kept, q.shape[1]
        packed = None
        if self._keep_state:
            call = PackPromptCall(k.detach(), v.detach(), kept.bits, kept.groups(length))
            cache, *packed = pack_prompt.unchecked(call)
            self.state = dict(zip(NAMES, cache, strict=True))
        window = length if kept.window is None else kept.window
        return quantised_attention(q, k, v, window, kept.sinks, scale, kept.bits, softcap, packed)

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
        """`attend` of one further token without padding, after a rotary embedding [B or 1, 1, R], if it is given."""
        kept, state = self.kept, self.state
        if not self._in_place:
            state = {name: tensor.clone() for name, tensor in state.items()}
        groups = kept.groups(self._seen + 1) - state["key_codes"].shape[2]
        if groups > 0:
            for name in PACKED:
                tail = [0, 0] * (state[name].dim() - 3)
                state[name] = F.pad(state[name], (*tail, 0, groups))
        cache = PackedKeyValues(*(state[name] for name in NAMES))
        q, k, v = (x.to(cache.keys.dtype) for x in (q, k, v))
        self.state = state
        return packed_step_(q, k, v, cache, kept.window, kept.sinks, kept.limit, scale, softcap, cos, sin)


@dataclass(frozen=True)
class _Arranged:
    """The tokens that a call reads, in the order of their numbers, from the first group that is kept."""

    numbers: Tensor  # [B, T] of the queries, from 0; -1 at padding
    base: Tensor  # [B] the first group
    count: Tensor  # [B] tokens after the call
    exact: tuple[Tensor, Tensor]  # keys and values [B, HK, L, D] of the last groups, as they are
    packed: tuple[Tensor, ...]  # the first four tensors of `PackedKeyValues` for all L / 32 groups
    sinks: tuple[Tensor, Tensor]  # [B, HK, 4, D]

    @classmethod
    def of(cls, kept: Kept, old: State, k: Tensor, v: Tensor, padding: Tensor | None) -> _Arranged:
        batch, length, heads, size = k.shape
        before = old["count"].long() if old else torch.zeros(batch, dtype=torch.long, device=k.device)
        numbers = Tokens.of(batch, length, padding, None, before, k.device).numbers.long().expand(batch, length) - 1
        held = old["key_codes"].shape[2] if old else 0
        current = (before - 1).clamp_min(0) // GROUP
        base = (current - held).clamp_min(0)
        groups = held + -(-length // GROUP) + (1 if old else 0)
        within = torch.arange(GROUP, device=k.device)
        own = (current - base)[:, None] * GROUP + within
        places = (numbers - base[:, None] * GROUP).where(numbers >= 0, groups * GROUP)
        first = numbers.where((numbers >= 0) & (numbers < SINKS), SINKS)
        exact, sinks = [], []
        for name, x in (("keys", k), ("values", v)):
            new = x.transpose(1, 2)
            room = new.new_zeros(batch, heads, groups * GROUP + 1, size)
            start = new.new_zeros(batch, heads, SINKS + 1, size)
            if old:
                room = _put(room, old[name][:, :, SINKS:].to(new), own)
                start[:, :, :SINKS] = old[name][:, :, :SINKS]
            exact.append(_put(room, new, places)[:, :, :-1])
            sinks.append(_put(start, new, first)[:, :, :-1])
        packed = pack_groups(exact[0], exact[1], kept.bits)
        if held:
            absolute = base[:, None] + torch.arange(groups, device=k.device)
            is_old = absolute < current[:, None]
            packed = tuple(  # type: ignore[assignment]
                _choose(is_old, _taken(old[name], absolute % held), new)
                for name, new in zip(PACKED, packed, strict=True)
            )
        return cls(numbers, base, before + (numbers >= 0).sum(1), tuple(exact), packed, tuple(sinks))  # type: ignore[arg-type]

    def state(self, groups: int) -> State:
        """The tensors of `groups` groups after the call."""
        current = (self.count - 1).clamp_min(0) // GROUP
        slots = torch.arange(groups, device=current.device)
        last = current[:, None] - 1
        number = last - (last - slots) % max(groups, 1)
        at = (number - self.base[:, None]).clamp(0, self.packed[0].shape[2] - 1)
        state: State = {name: _taken(x, at) for name, x in zip(PACKED, self.packed, strict=True)}
        own = (current - self.base)[:, None] * GROUP + torch.arange(GROUP, device=current.device)
        for name, exact, sinks in zip(("keys", "values"), self.exact, self.sinks, strict=True):
            state[name] = torch.cat([sinks, _taken(exact, own)], dim=2)
        state["count"] = self.count.int()
        return state

    def attend(self, q: Tensor, kept: Kept, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
        """See `PackedTokens.attend`; a mask says which form of which token a query sees."""
        wide = torch.promote_types(q.dtype, torch.float32)
        length = self.exact[0].shape[2]
        cache = PackedKeyValues(*self.packed, *self.exact, self.count)  # type: ignore[call-arg]
        keys, values = (
            torch.cat(parts, dim=2).to(wide)
            for parts in zip(self.sinks, unpacked(cache, self.exact[0].dtype), self.exact, strict=True)
        )
        token = self.base[:, None] * GROUP + torch.arange(length, device=q.device)
        first = torch.arange(SINKS, device=q.device).expand(len(q), -1)
        j = torch.cat([first, token.where(token >= SINKS, -1), token], dim=1)[:, None]  # [B, 1, SINKS + 2 L]
        is_exact = torch.arange(j.shape[2], device=q.device) >= SINKS + length
        is_sink = torch.arange(j.shape[2], device=q.device) < SINKS
        outputs, sums = [], []
        step = max(1, MOST_SCORES // (len(q) * q.shape[2] * j.shape[2]))
        for some, numbers in zip(q.split(step, dim=1), self.numbers.split(step, dim=1), strict=True):
            i = numbers.unsqueeze(2)
            same = j // GROUP == i // GROUP
            seen = (j >= 0) & (j <= i) & torch.where(is_exact, same, ~same)
            if kept.window is not None:
                seen = seen & ((i - j < kept.window) | (j < kept.sinks))
            if kept.limit is not None:
                seen = seen & (i - j < kept.limit)
            seen = seen | ((i < 0) & is_sink)  # padding sees something, because nothing gives NaN
            grouped = some.unflatten(2, (keys.shape[1], -1)).to(wide)
            scores = torch.einsum("bthgd,bhnd->bthgn", grouped, keys) * scale
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            scores = scores.masked_fill(~seen[:, :, None, None], -torch.inf)
            lse = scores.logsumexp(-1)
            output = torch.einsum("bthgn,bhnd->bthgd", (scores - lse.unsqueeze(-1)).exp(), values)
            outputs.append(output.flatten(2, 3).to(q.dtype))
            sums.append(lse.flatten(2, 3))
        return torch.cat(outputs, dim=1), torch.cat(sums, dim=1)


def _put(room: Tensor, new: Tensor, places: Tensor) -> Tensor:
    """`room` [B, HK, S, D] with the tokens `new` [B, HK, T, D] at the places [B, T]."""
    return room.scatter(2, places[:, None, :, None].expand_as(new), new)


def _taken(x: Tensor, places: Tensor) -> Tensor:
    """The parts of x [B, HK, S, ...] at `places` [B, M]: [B, HK, M, ...]."""
    index = places.view(len(places), 1, -1, *[1] * (x.dim() - 3))
    return x.gather(2, index.expand(-1, x.shape[1], -1, *x.shape[3:]))


def _choose(first: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The groups of x [B, HK, N, ...] where `first` [B, N] is True, else those of y."""
    return x.where(first.view(len(first), 1, -1, *[1] * (x.dim() - 3)), y)
