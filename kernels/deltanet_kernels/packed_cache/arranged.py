"""Several tokens after those of a packed cache, in PyTorch: with padding, on a CPU, or what the kernels do not support.

The tokens of the cache and of the call are laid out in the order of their numbers, from the first group that the cache
keeps. All their groups are packed, those of the cache are as they were; a mask says which form of which token a query
sees; and the groups that the cache keeps after the call are taken from the same layout.

Shapes: B batch, T tokens of the call, HK key heads, D head size, L places of the layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltanet_kernels.common.registration import is_observed
from deltanet_kernels.packed_cache.calls import PackedPartCall, PackPromptCall, PromptAttentionCall
from deltanet_kernels.packed_cache.layout import (
    GROUP,
    SINKS,
    PackedKeyValues,
    packed_groups,
    token_tensors,
    tokens_of,
    unpacked,
)
from deltanet_kernels.packed_cache.reference import known_lengths, torch_pack_prompt, torch_prompt_attention
from deltanet_kernels.window.masked import attention

MOST_SCORES = 2**24  # that a call holds at a time
QUERIES = 256  # of a call at a time where windows end, at least: each such run reads a window more than its own places


@dataclass(frozen=True)
class ArrangedTokens:
    """The tokens of the cache and of a call; see the module's docstring."""

    numbers: Tensor  # [B, T] of the queries, from 0; -1 at padding
    base: Tensor  # [B] the first group
    count: Tensor  # [B] tokens after the call
    tokens: tuple[Tensor, Tensor]  # keys and values [B, HK, L, D] of the last groups, not packed
    packed: tuple[Tensor, ...]  # the first four tensors of `PackedKeyValues` for all L / 32 groups
    sinks: tuple[Tensor, Tensor]  # [B, HK, 4, D]
    key_order: Tensor | None

    @classmethod
    def of(cls, k: Tensor, v: Tensor, numbers: Tensor, old: PackedKeyValues) -> ArrangedTokens:
        """The tokens k, v [B, T, HK, D] of these numbers [B, T], after those of `old`."""
        batch, length, heads, size = k.shape
        before, held = old.lengths.long(), old.groups
        current = (before - 1).clamp_min(0) // GROUP
        base = (current - held).clamp_min(0)
        groups = held + 1 + -(-length // GROUP)
        within = torch.arange(GROUP, device=k.device)
        own = (current - base)[:, None] * GROUP + within
        is_left = (current[:, None] * GROUP + within >= before[:, None])[:, None, :, None]  # from the group before it
        places = (numbers - base[:, None] * GROUP).where(numbers >= 0, groups * GROUP)
        first = numbers.where((numbers >= 0) & (numbers < SINKS), SINKS)
        tokens, sinks = [], []
        for x, kept in zip((k, v), tokens_of(old, k.dtype), strict=True):
            new = x.transpose(1, 2)
            filled = new.new_zeros(batch, heads, groups * GROUP + 1, size)
            start = new.new_zeros(batch, heads, SINKS + 1, size)
            filled = _put(filled, kept[:, :, SINKS:].masked_fill(is_left, 0), own)
            start[:, :, :SINKS] = kept[:, :, :SINKS]
            tokens.append(_put(filled, new, places)[:, :, :-1])
            sinks.append(_put(start, new, first)[:, :, :-1])
        packed: tuple[Tensor, ...] = packed_groups(tokens[0], tokens[1], old.bits, old.key_order)
        if held:
            absolute = base[:, None] + torch.arange(groups, device=k.device)
            is_old = absolute < current[:, None]
            packed = tuple(
                _choose(is_old, _taken(x, absolute % held), new) for x, new in zip(old[:4], packed, strict=True)
            )
        count = before + (numbers >= 0).sum(1)
        return cls(numbers, base, count, (tokens[0], tokens[1]), packed, (sinks[0], sinks[1]), old.key_order)

    def state(self, groups: int) -> PackedKeyValues:
        """The cache of `groups` groups after the call."""
        current = (self.count - 1).clamp_min(0) // GROUP
        slots = torch.arange(groups, device=current.device)
        last = current[:, None] - 1
        number = last - (last - slots) % max(groups, 1)
        at = (number - self.base[:, None]).clamp(0, self.packed[0].shape[2] - 1)
        packed = (_choose(number >= 0, _taken(x, at), torch.zeros_like(x[:, :, :1])) for x in self.packed)
        own = (current - self.base)[:, None] * GROUP + torch.arange(GROUP, device=current.device)
        k, v = (torch.cat([sinks, _taken(x, own)], dim=2) for x, sinks in zip(self.tokens, self.sinks, strict=True))
        return PackedKeyValues(*packed, *token_tensors(k, v), self.count.int(), self.key_order)  # type: ignore[call-arg]

    def attend(
        self,
        q: Tensor,
        restored: tuple[Tensor, Tensor],
        window: int,
        sinks: int,
        limit: int,
        scale: float,
        softcap: float | None,
        edge: int,
    ) -> tuple[Tensor, Tensor]:
        """The attention of q [B, T, HQ, D], see `PackedPartCall`; a mask says which form of which token it sees.

        `restored` are the keys and values [B, HK, L, D] of `packed`.
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        tokens = self.tokens
        length, base = tokens[0].shape[2], self.base[:, None] * GROUP
        token = base + torch.arange(length, device=q.device)
        first = torch.arange(SINKS, device=q.device).expand(len(q), -1)
        known = None
        if not (self.numbers.is_cuda or is_observed()):  # of CUDA tensors nothing is read on the host
            known = (self.numbers - base).masked_fill(self.numbers < 0, -1)
        outputs, sums = [], []
        seen_at_once = length if known is None else min(length, window + edge + QUERIES)
        step = max(1, MOST_SCORES // (len(q) * q.shape[2] * (SINKS + 2 * seen_at_once)))
        if seen_at_once < length:
            step = min(step, QUERIES)
        for start in range(0, q.shape[1], step):
            some, numbers = q[:, start : start + step], self.numbers[:, start : start + step]
            far, own = slice(0, length), slice(0, length)
            if known is not None:
                places = known[:, start : start + step]
                last = int(places.max()) + 1
                least = int(places.where(places >= 0, last).min())
                far = slice(max(0, least - window - edge + 2), last)
                own = slice(least // GROUP * GROUP, last)
            keys, values = (
                torch.cat([one, seen[:, :, far], x[:, :, own]], dim=2).to(wide)
                for one, seen, x in zip(self.sinks, restored, tokens, strict=True)
            )
            j = torch.cat([first, token[:, far].where(token[:, far] >= SINKS, -1), token[:, own]], dim=1)[:, None]
            place = torch.arange(j.shape[2], device=q.device)
            is_own, is_sink = place >= j.shape[2] - token[:, own].shape[1], place < SINKS
            i = numbers.unsqueeze(2)
            same = j // GROUP == i // GROUP
            seen = (j >= 0) & (j <= i) & torch.where(is_own, same, ~same)
            seen = seen & ((i // edge * edge - j < window) | (j < sinks)) & (i - j < limit)
            seen = seen | ((i < 0) & is_sink)  # padding sees something, because nothing gives NaN
            output, lse = attention(some.to(wide), keys, values, seen.unsqueeze(1), scale, softcap)
            outputs.append(output.to(q.dtype))
            sums.append(lse)
        return torch.cat(outputs, dim=1), torch.cat(sums, dim=1)


def attention_by_numbers(
    call: PackedPartCall, numbers: Tensor
) -> tuple[Tensor, Tensor, PackedKeyValues, Tensor, Tensor]:
    """As `packed_part`, of tokens with these numbers [B, T] in their sequences, counted from 0; -1 is padding."""
    arranged = ArrangedTokens.of(call.k, call.v, numbers, call.cache)
    restored = unpacked(arranged.packed, call.k.dtype, call.cache.key_order)
    o, lse = arranged.attend(call.q, restored, *call.reach, call.factor, call.softcap, call.edge)
    keys, values = (x.transpose(1, 2) for x in restored)
    return o, lse, arranged.state(call.groups), keys, values


def torch_packed_part(call: PackedPartCall) -> tuple[Tensor, Tensor, PackedKeyValues, Tensor, Tensor]:
    """`deltanet_kernels.packed_part` in PyTorch."""
    if call.cu_seqlens is not None:
        return _one_by_one(call, call.cu_seqlens.diff().tolist())
    T, (window, sinks, limit) = call.q.shape[1], call.reach
    begins = known_lengths(call.cache.lengths) == (0,) * len(call.q)
    if begins and (sinks == 0 or limit >= T):
        held = call.cache.bits, call.groups, None, call.cache.key_order
        cache, keys, values = torch_pack_prompt(PackPromptCall(call.k, call.v, *held))
        rest = min(window, T), sinks, call.factor, call.softcap, call.edge
        prompt = PromptAttentionCall(call.q, call.k, call.v, keys, values, *rest)
        return *torch_prompt_attention(prompt), cache, keys, values
    places = torch.arange(call.q.shape[1], device=call.q.device)
    return attention_by_numbers(call, call.cache.lengths.long()[:, None] + places)


def _one_by_one(call: PackedPartCall, lengths: list[int]) -> tuple[Tensor, Tensor, PackedKeyValues, Tensor, Tensor]:
    """`torch_packed_part` of sequences in one row."""
    found = [
        torch_packed_part(call._replace(q=q, k=k, v=v, cache=call.cache.with_tensors(cache), cu_seqlens=None))
        for q, k, v, *cache in zip(
            *(x.split(lengths, dim=1) for x in call[:3]), *(x.split(1) for x in call.cache.tensors), strict=True
        )
    ]
    outputs, sums, caches, keys, values = zip(*found, strict=True)
    o, lse, k, v = (torch.cat(x, dim=1) for x in (outputs, sums, keys, values))
    return o, lse, PackedKeyValues.joined(caches), k, v


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
