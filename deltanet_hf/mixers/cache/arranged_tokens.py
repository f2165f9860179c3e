"""A call that reads a packed cache token by token: padding, or several tokens after others.

The tokens of the cache and of the call are laid out in the order of their numbers, from the first group that the cache
keeps. All their groups are packed, those of the cache are as they were; a mask says which form of which token a query
sees; and the groups that the cache keeps after the call are taken from the same layout.

Shapes as in `packed_tokens.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltanet_hf.mixers.cache.packed_reach import PACKED, PackedReach
from deltanet_hf.mixers.cache.state import State
from deltanet_hf.mixers.cache.window_cache import Tokens
from deltanet_kernels import PackedKeyValues, pack_groups
from deltanet_kernels.packed_cache.layout import GROUP, SINKS, unpacked

MOST_SCORES = 2**24  # that a call holds at a time


@dataclass(frozen=True)
class ArrangedTokens:
    """The tokens of the cache and of a call; see the module's docstring."""

    numbers: Tensor  # [B, T] of the queries, from 0; -1 at padding
    base: Tensor  # [B] the first group
    count: Tensor  # [B] tokens after the call
    exact: tuple[Tensor, Tensor]  # keys and values [B, HK, L, D] of the last groups, as they are
    packed: tuple[Tensor, ...]  # the first four tensors of `PackedKeyValues` for all L / 32 groups
    sinks: tuple[Tensor, Tensor]  # [B, HK, 4, D]

    @classmethod
    def of(cls, kept: PackedReach, old: State, k: Tensor, v: Tensor, padding: Tensor | None) -> ArrangedTokens:
        """The tensors `old` of the cache before the call (empty before the first token), and k, v [B, T, HK, D]."""
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
            filled = new.new_zeros(batch, heads, groups * GROUP + 1, size)
            start = new.new_zeros(batch, heads, SINKS + 1, size)
            if old:
                filled = _put(filled, old[name][:, :, SINKS:].to(new), own)
                start[:, :, :SINKS] = old[name][:, :, :SINKS]
            exact.append(_put(filled, new, places)[:, :, :-1])
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

    def attend(self, q: Tensor, kept: PackedReach, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
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
            if kept.family_window is not None:
                seen = seen & (i - j < kept.family_window)
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


def _put(filled: Tensor, new: Tensor, places: Tensor) -> Tensor:
    """`filled` [B, HK, S, D] with the tokens `new` [B, HK, T, D] at the places [B, T]."""
    return filled.scatter(2, places[:, None, :, None].expand_as(new), new)


def _taken(x: Tensor, places: Tensor) -> Tensor:
    """The parts of x [B, HK, S, ...] at `places` [B, M]: [B, HK, M, ...]."""
    index = places.view(len(places), 1, -1, *[1] * (x.dim() - 3))
    return x.gather(2, index.expand(-1, x.shape[1], -1, *x.shape[3:]))


def _choose(first: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The groups of x [B, HK, N, ...] where `first` [B, N] is True, else those of y."""
    return x.where(first.view(len(first), 1, -1, *[1] * (x.dim() - 3)), y)
