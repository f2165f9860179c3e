"""The operators on a packed cache by PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from deltanet_kernels.common.rotation import rotate
from deltanet_kernels.packed_cache.calls import PackedAttentionCall, PackedStepCall, PackGroupsCall
from deltanet_kernels.packed_cache.layout import (
    GROUP,
    SINKS,
    PackedKeyValues,
    packed_groups,
    token_numbers,
    unpacked,
)


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
