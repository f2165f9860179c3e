"""The operators on a packed cache by PyTorch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deltanet_kernels.common.registration import is_observed
from deltanet_kernels.common.rotation import rotate
from deltanet_kernels.packed_cache.calls import (
    PackedAttentionCall,
    PackedStepCall,
    PackGroupsCall,
    PackPromptCall,
    PromptAttentionCall,
    RoundTokensCall,
)
from deltanet_kernels.packed_cache.layout import (
    GROUP,
    SINKS,
    PackedKeyValues,
    by_places,
    in_stored_order,
    key_bits,
    packed_groups,
    rounded_tokens,
    scales_of,
    stored_codes,
    token_numbers,
    token_tensors,
    tokens_of,
    unpacked,
)
from deltanet_kernels.window.calls import WindowCall
from deltanet_kernels.window.cpu import flash_attention, torch_window_attention
from deltanet_kernels.window.masked import by_flash


def torch_packed_attention(call: PackedAttentionCall) -> tuple[Tensor, Tensor]:
    """`deltanet_kernels.packed_attention` in PyTorch, in float32 at least.

    On a CPU a step is as long as its operations are many, and its numbers are mostly those of the codes. So these stay
    in the order in which they are stored; what they are multiplied with is brought into the same order.
    """
    cache, bits, wide = call.cache, call.cache.bits, torch.promote_types(call.q.dtype, torch.float32)
    (B, HQ, _, D), (HK, N) = call.q.shape, cache.key_codes.shape[1:3]
    heads, R, parts = B * HK, HQ // HK, cache.value_scales.shape[3]
    q = call.q.reshape(heads, R, D).to(wide) * call.factor
    ordered = cache.key_order is not None
    widths = in_stored_order(key_bits(D, q.device), bits) if ordered else bits
    scale, low = (x.view(heads * N, 1, D).to(wide) for x in scales_of(in_stored_order(cache.key_scales, bits), widths))
    codes = stored_codes(cache.key_codes, bits, ordered).to(wide).view(heads * N, GROUP, D)
    keys = torch.addcmul(low, codes, scale, out=codes).view(heads, N * GROUP, D)
    near_keys, near_values = (x.view(heads, SINKS + GROUP, D) for x in tokens_of(cache, wide))
    far_q = in_stored_order(by_places(q.view(B, HK, R, D), cache.key_order).view(q.shape), bits)
    near_scores = q @ near_keys.mT
    if call.first_q is not None:
        first_q = call.first_q.reshape(q.shape).to(wide) * call.factor
        near_scores = torch.cat([first_q @ near_keys[:, :SINKS].mT, near_scores[..., SINKS:]], dim=2)
    scores = torch.cat([far_q @ keys.mT, near_scores], dim=2)
    if call.softcap is not None:
        scores = call.softcap * (scores / call.softcap).tanh()
    scores.view(B, HK, R, -1).masked_fill_(_unseen(call), -torch.inf)
    weights = scores.softmax(2)
    lse = scores.amax(2) - weights.amax(2).log()
    far, near = weights.split([N * GROUP, SINKS + GROUP], dim=2)
    far = in_stored_order(far.unflatten(2, (N, GROUP)).transpose(1, 2), bits).flatten(0, 1)  # [B HK N, R, 32]
    words = in_stored_order(cache.value_scales, bits)
    scale, low = (x.view(heads * N, parts, 1, GROUP).to(wide) for x in scales_of(words, bits))
    codes = stored_codes(cache.value_codes, bits).to(wide).view(heads * N, parts, D // parts, GROUP)
    values = torch.addcmul(low, codes, scale, out=codes).view(heads * N, D, GROUP)
    output = torch.baddbmm((far @ values.mT).view(heads, N, R, D).sum(1), near, near_values)
    return output.view(call.q.shape).to(call.q.dtype), lse.view(B, HQ)


def _unseen(call: PackedAttentionCall) -> Tensor:
    """[B, 1, 1, N * 32 + 36] bool: the places of `token_numbers` that hold no token which the query sees."""
    lengths, groups = call.cache.lengths, call.cache.groups
    known = known_lengths(lengths)
    reach = *call.reach, call.edge
    return _unseen_places(lengths, groups, *reach) if known is None else _unseen_by(known, groups, *reach)


@functools.lru_cache(maxsize=16)  # layers with windows of one length have the same at each step
def _unseen_by(lengths: tuple[int, ...], groups: int, window: int, sinks: int, limit: int, edge: int) -> Tensor:
    return _unseen_places(torch.tensor(lengths, device="cpu"), groups, window, sinks, limit, edge)


def _unseen_places(lengths: Tensor, groups: int, window: int, sinks: int, limit: int, edge: int) -> Tensor:
    numbers, query = token_numbers(lengths, groups), lengths[:, None] - 1
    behind = (query // edge * edge - numbers >= window) & (numbers >= sinks)
    return ((numbers < 0) | (query - numbers >= limit) | behind)[:, None, None]


def known_lengths(lengths: Tensor) -> tuple[int, ...] | None:
    """The numbers in `lengths`; None on CUDA, where reading waits, and in calls that are traced for any lengths."""
    return None if is_observed() or lengths.is_cuda else tuple(lengths.tolist())


def torch_round_tokens(call: RoundTokensCall) -> tuple[Tensor, Tensor]:
    """`deltanet_kernels.round_tokens` in PyTorch, differentiable."""
    return _straight_through(call.k, rounded_tokens(call.k)), _straight_through(call.v, rounded_tokens(call.v))


def torch_pack_groups(call: PackGroupsCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`deltanet_kernels.pack_groups` in PyTorch."""
    return packed_groups(*call)


def torch_pack_prompt(call: PackPromptCall) -> tuple[PackedKeyValues, Tensor, Tensor]:
    """`deltanet_kernels.pack_prompt` in PyTorch."""
    if call.cu_seqlens is not None:
        return _pack_row(call, call.cu_seqlens.diff().tolist())
    k, v = (x.transpose(1, 2) for x in call[:2])
    B, T = call.k.shape[:2]
    N = (T - 1) // GROUP
    complete = k[:, :, : N * GROUP], v[:, :, : N * GROUP]
    packed: tuple[Tensor, ...] = packed_groups(*complete, call.bits, call.key_order)
    end = torch.full((1,), T, device=k.device) if call.length is None else call.length
    current = (end - 1) // GROUP
    places = torch.cat([torch.arange(SINKS, device=k.device), current * GROUP + torch.arange(GROUP, device=k.device)])
    is_padding = (places >= end).unsqueeze(1)
    keys, values = (x.index_select(2, places.clamp_max(T - 1)).masked_fill(is_padding, 0) for x in (k, v))
    lengths = end.int().repeat(B)
    tokens = token_tensors(keys, values)
    seen = [
        torch.cat([x[:, :, : min(SINKS, N * GROUP)], restored[:, :, SINKS:]], dim=2).transpose(1, 2)
        for x, restored in zip((k, v), unpacked(packed, k.dtype, call.key_order), strict=True)
    ]
    groups = N if call.groups is None else call.groups
    if groups > N:
        packed = tuple(F.pad(x, (*[0, 0] * (x.dim() - 3), 0, groups - N)) for x in packed)
    last = current - 1
    number = last - (last - torch.arange(groups, device=k.device)) % max(groups, 1)  # of the group in each place
    taken = (x.index_select(2, number.clamp_min(0)) for x in packed)
    packed = tuple(x.masked_fill((number < 0).view(-1, *[1] * (x.dim() - 3)), 0) for x in taken)
    return PackedKeyValues(*packed, *tokens, lengths, call.key_order), seen[0], seen[1]  # type: ignore[call-arg]


def _pack_row(call: PackPromptCall, lengths: list[int]) -> tuple[PackedKeyValues, Tensor, Tensor]:
    """`torch_pack_prompt` of each of the sequences in one row by itself."""
    groups = (call.longest - 1) // GROUP if call.groups is None else call.groups
    parts = zip(*(x.split(lengths, dim=1) for x in call[:2]), strict=True)
    found = [torch_pack_prompt(call._replace(k=k, v=v, groups=groups, cu_seqlens=None)) for k, v in parts]
    caches, *seen = zip(*found, strict=True)
    keys, values = (
        torch.cat([F.pad(x, (0, 0, 0, 0, 0, n - x.shape[1])) for x, n in zip(rows, lengths, strict=True)], dim=1)
        for rows in seen
    )
    return PackedKeyValues.joined(caches), keys, values


def torch_prompt_attention(call: PromptAttentionCall) -> tuple[Tensor, Tensor]:
    """`deltanet_kernels.prompt_attention` in PyTorch, differentiable.

    Where PyTorch's flash attention serves, each query has one softmax over the other form of earlier groups and its own
    group. Elsewhere, attention to the other form of all tokens comes first; then, within each group, its terms are
    exchanged for those of k and v.
    """
    if call.cu_seqlens is not None:
        return _attend_in_row(call, call.cu_seqlens.diff().tolist())
    q, k, v, *others, window, sinks, scale, softcap, edge, _, _ = call
    length, wide = q.shape[1], torch.promote_types(q.dtype, torch.float32)
    if by_flash(q, k, v, softcap) and not torch.compiler.is_compiling():
        q, k, v, keys, values = (x.to(wide) for x in (q, k, v, *others))
        o, lse = flash_attention(q, keys, values, window, sinks, scale, (k, v, GROUP), edge)
        return o.to(call.q.dtype), lse
    keys, values = (_rounded(x, y) for x, y in zip((k, v), others, strict=True))
    near, lse = torch_window_attention(WindowCall(q, keys, values, window, sinks, scale, None, softcap, edge))
    padded = -length % GROUP

    def grouped(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, 0, 0, padded)).unflatten(1, (-1, GROUP)).to(wide)

    queries = grouped(q).unflatten(3, (k.shape[2], -1))  # [B, N, GROUP, HK, R, D]
    total = F.pad(lse, (0, 0, 0, padded)).unflatten(1, (-1, GROUP)).unflatten(3, (k.shape[2], -1)).unsqueeze(-1)
    places = torch.arange(GROUP, device=q.device)
    distance = places[:, None] - places
    reach = places[:, None] // edge * edge - places
    unseen = ((distance < 0) | (reach >= window))[:, None, None, :]  # or sinks, which are exact anyway
    own: Tensor = queries.new_zeros(())
    weight: Tensor = queries.new_zeros(())
    for sign, some_keys, some_values in ((1, k, v), (-1, keys, values)):
        scores = torch.einsum("bnqhrd,bnkhd->bnqhrk", queries, grouped(some_keys)) * scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        weights = sign * (scores - total).masked_fill(unseen, -torch.inf).exp()
        own = own + torch.einsum("bnqhrk,bnkhd->bnqhrd", weights, grouped(some_values))
        weight = weight + weights.sum(-1, keepdim=True)
    own, weight = (x.flatten(3, 4).flatten(1, 2)[:, :length] for x in (own, weight))
    return ((near.to(wide) + own) / (1 + weight)).to(near.dtype), lse + weight.squeeze(-1).log1p()


def _attend_in_row(call: PromptAttentionCall, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """`torch_prompt_attention` of each of the sequences in one row by itself."""
    found = []
    for q, k, v, *others in zip(*(x.split(lengths, dim=1) for x in call[:5]), strict=True):
        keys, values = (x[:, : (x.shape[1] - 1) // GROUP * GROUP] for x in others)
        alone = call._replace(q=q, k=k, v=v, keys=keys, values=values, cu_seqlens=None)
        found.append(torch_prompt_attention(alone))
    o, lse = (torch.cat(x, dim=1) for x in zip(*found, strict=True))
    return o, lse


def _rounded(x: Tensor, other: Tensor) -> Tensor:
    """x [B, T, HK, D] with the values of its other form [B, N, HK, D]."""
    return _straight_through(x, torch.cat([other, x[:, other.shape[1] :]], dim=1))


def _straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """The numbers of `rounded`, with the gradients of x."""
    return rounded.detach() + (x - x.detach()) if x.requires_grad else rounded


def torch_packed_step_(call: PackedStepCall) -> tuple[Tensor, Tensor]:
    """`deltanet_kernels.packed_step_` in PyTorch."""
    if call.state_indices is not None:
        return _step_by_indices(call, call.state_indices.long())
    q, k = call.q, call.k
    if call.cos is not None and call.sin is not None:
        q, k = rotate(torch.cat([q, k], dim=2), call.cos, call.sin).split([q.shape[2], k.shape[2]], dim=2)
    append(k.transpose(1, 2), call.v.transpose(1, 2), call.cache)
    o, lse = torch_packed_attention(call._replace(q=q).attention)
    return o.transpose(1, 2), lse.unsqueeze(1)


def _step_by_indices(call: PackedStepCall, state_indices: Tensor) -> tuple[Tensor, Tensor]:
    """A step of a call with indices, on copies of rows; those of tokens go back, and a group that has been packed."""
    held, pages = call.cache, call.packed_rows
    assert pages is not None
    pages = pages.long()
    packed: Any = (x[pages].transpose(1, 2).flatten(2, 3) for x in held[:4])
    own = held.with_tensors([*packed, *(x[state_indices] for x in held.tensors[4:])])
    number = own.lengths.long()
    found = torch_packed_step_(call._replace(cache=own, state_indices=None, pages=None))
    if own.groups:
        place = (number // GROUP - 1) % own.groups
        row = pages.gather(1, place[:, None] // held.groups)[:, 0]
        row = row * ((number > 0) & (number % GROUP == 0))  # where no group is complete, row 0, which holds no sequence
        rows = torch.arange(len(state_indices), device=state_indices.device)
        for x, new in zip(held[:4], own[:4], strict=True):
            x[row, :, place % held.groups] = new[rows, :, place]
    for x, new in zip(held.tensors[4:], own.tensors[4:], strict=True):
        x[state_indices] = new
    return found


def append(k: Tensor, v: Tensor, cache: PackedKeyValues) -> None:
    """Put k and v [B, HK, 1, D] into the cache, in place."""
    number, known = cache.lengths.long(), known_lengths(cache.lengths)
    if cache.groups and (known is None or any(n > 0 and n % GROUP == 0 for n in known)):
        _pack_complete(cache, number)
    number = number.view(-1, 1, 1, 1)
    for held, x in zip(cache[4:7], token_tensors(k, v), strict=True):
        held.scatter_(2, (SINKS + number % GROUP).expand_as(x), x)
        if known is None or min(known) < SINKS:
            first = number.clamp_max(SINKS - 1).expand_as(x)
            held.scatter_(2, first, x.where(number < SINKS, held.gather(2, first)))
    cache.lengths.add_(1)


def _pack_complete(cache: PackedKeyValues, number: Tensor) -> None:
    """Pack the current groups of those sequences [B] of which the next token begins another."""
    rows = torch.arange(len(number), device=number.device)
    full = (number > 0) & (number % GROUP == 0)
    place = (number // GROUP - 1) % cache.groups
    keys, values = (x[:, :, SINKS:] for x in tokens_of(cache, torch.float32))
    new = packed_groups(keys, values, cache.bits, cache.key_order)
    for held, packed in zip(cache[:4], new, strict=True):
        chosen = full.view(-1, *[1] * (held.dim() - 2))
        held[rows, :, place] = packed[:, :, 0].where(chosen, held[rows, :, place])
