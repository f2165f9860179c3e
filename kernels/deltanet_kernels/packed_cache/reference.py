"""The operators on a packed cache by PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from deltanet_kernels.common.rotation import rotate
from deltanet_kernels.packed_cache.calls import (
    PackedAttentionCall,
    PackedStepCall,
    PackGroupsCall,
    PackPromptCall,
    PromptAttentionCall,
)
from deltanet_kernels.packed_cache.layout import (
    GROUP,
    SINKS,
    PackedKeyValues,
    packed_groups,
    token_numbers,
    unpacked,
)
from deltanet_kernels.window.cpu import blocked_attention, by_flash
from deltanet_kernels.window.operators import window_attention


def torch_packed_attention(call: PackedAttentionCall) -> tuple[Tensor, Tensor]:
    """`deltanet_kernels.packed_attention` in PyTorch, in float32 at least."""
    q, cache, softcap = call.q, call.cache, call.softcap
    window, sinks, limit = call.reach
    keys, values = (torch.cat(both, dim=2) for both in zip(unpacked(cache, cache.keys.dtype), cache[4:6], strict=True))
    wide = torch.promote_types(q.dtype, torch.float32)
    numbers = token_numbers(cache)
    distance = cache.lengths[:, None] - 1 - numbers
    seen = (numbers >= 0) & (distance < limit) & ((distance < window) | (numbers < sinks))
    grouped = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[3]).to(wide)
    scores = grouped @ keys.to(wide).mT * call.factor
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    lse = scores.logsumexp(-1)
    output = (scores - lse.unsqueeze(-1)).exp() @ values.to(wide)
    return output.reshape(q.shape).to(q.dtype), lse.reshape(q.shape[:2])


def torch_pack_groups(call: PackGroupsCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`deltanet_kernels.pack_groups` in PyTorch."""
    return packed_groups(*call)


def torch_pack_prompt(call: PackPromptCall) -> tuple[PackedKeyValues, Tensor, Tensor]:
    """`deltanet_kernels.pack_prompt` in PyTorch."""
    k, v = (x.transpose(1, 2) for x in call[:2])
    B, T = call.k.shape[:2]
    N = (T - 1) // GROUP
    packed: tuple[Tensor, ...] = packed_groups(k[:, :, : N * GROUP], v[:, :, : N * GROUP], call.bits)
    padded = [F.pad(x, (0, 0, 0, (N + 1) * GROUP - T)) for x in (k, v)]
    keys, values = (torch.cat([x[:, :, :SINKS], x[:, :, N * GROUP :]], dim=2) for x in padded)
    lengths = torch.full((B,), T, dtype=torch.int32, device=k.device)
    cache = PackedKeyValues(*packed, keys, values, lengths)  # type: ignore[call-arg]
    seen = [
        torch.cat([x[:, :, : min(SINKS, N * GROUP)], restored[:, :, SINKS:]], dim=2).transpose(1, 2)
        for x, restored in zip((k, v), unpacked(cache, k.dtype), strict=True)
    ]
    groups = N if call.groups is None else call.groups
    packed = tuple(x[:, :, max(0, N - groups) :] for x in packed)
    if groups > N:
        packed = tuple(F.pad(x, (*[0, 0] * (x.dim() - 3), 0, groups - N)) for x in packed)
    elif groups and N % groups:
        packed = tuple(x.roll(N % groups, dims=2) for x in packed)
    return PackedKeyValues(*packed, keys, values, lengths), seen[0], seen[1]  # type: ignore[call-arg]


def torch_prompt_attention(call: PromptAttentionCall) -> tuple[Tensor, Tensor]:
    """`deltanet_kernels.prompt_attention` in PyTorch, differentiable.

    Where PyTorch's flash attention serves, each query has one softmax over the other form of earlier groups and its own
    group. Elsewhere, attention to the other form of all tokens comes first; then, within each group, its terms are
    exchanged for those of k and v.
    """
    q, k, v, *others, window, sinks, scale, softcap = call
    length, wide = q.shape[1], torch.promote_types(q.dtype, torch.float32)
    keys, values = (torch.cat([y, x[:, y.shape[1] :]], dim=1) for x, y in zip((k, v), others, strict=True))
    if window < length and by_flash(q, k, v, softcap):
        q, k, v, keys, values = (x.to(wide) for x in (q, k, v, keys, values))
        o, lse = blocked_attention(q, keys, values, window, sinks, scale, softcap, own=(k, v, GROUP))
        return o.to(call.q.dtype), lse
    near, lse = window_attention(q, keys, values, window, sinks, scale, None, softcap)
    padded = -length % GROUP

    def grouped(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, 0, 0, padded)).unflatten(1, (-1, GROUP)).to(wide)

    queries = grouped(q).unflatten(3, (k.shape[2], -1))  # [B, N, GROUP, HK, R, D]
    total = F.pad(lse, (0, 0, 0, padded)).unflatten(1, (-1, GROUP)).unflatten(3, (k.shape[2], -1)).unsqueeze(-1)
    places = torch.arange(GROUP, device=q.device)
    distance = places[:, None] - places
    unseen = ((distance < 0) | (distance >= window))[:, None, None, :]  # or sinks, which are exact anyway
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


def torch_packed_step_(call: PackedStepCall) -> tuple[Tensor, Tensor]:
    """`deltanet_kernels.packed_step_` in PyTorch."""
    q, k = call.q, call.k
    if call.cos is not None and call.sin is not None:
        q, k = (rotate(x, call.cos, call.sin) for x in (q, k))
    append(k.transpose(1, 2), call.v.transpose(1, 2), call.cache)
    o, lse = torch_packed_attention(call._replace(q=q).attention)
    return o.transpose(1, 2), lse.unsqueeze(1)


def append(k: Tensor, v: Tensor, cache: PackedKeyValues) -> None:
    """Put k and v [B, HK, 1, D] into the cache, in place."""
    rows = torch.arange(len(cache.lengths), device=k.device)
    number = cache.lengths.long()
    if cache.groups:
        full = (number > 0) & (number % GROUP == 0)
        place = (number // GROUP - 1) % cache.groups
        new = packed_groups(cache.keys[:, :, SINKS:], cache.values[:, :, SINKS:], cache.bits)
        for held, packed in zip(cache[:4], new, strict=True):
            chosen = full.view(-1, *[1] * (held.dim() - 2))
            held[rows, :, place] = packed[:, :, 0].where(chosen, held[rows, :, place])
    for held, x in zip(cache[4:6], (k, v), strict=True):
        held[rows, :, SINKS + number % GROUP] = x[:, :, 0]
        first = number.clamp_max(SINKS - 1)
        held[rows, :, first] = x[:, :, 0].where((number < SINKS).view(-1, 1, 1), held[rows, :, first])
    cache.lengths.add_(1)
