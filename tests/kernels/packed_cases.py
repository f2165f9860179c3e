"""Packed caches and tokens that the tests of them share, and the definition of their attention in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from deltanet_kernels import PackedKeyValues
from deltanet_kernels.packed_cache.layout import (
    GROUP,
    SINKS,
    packed_groups,
    quantised,
    restored,
    rounded_tokens,
)
from tests.kernels.triton_mode import DEVICE


def empty(like: Tensor, groups: int, bits: int) -> PackedKeyValues:
    B, HK, _, D = like.shape
    packed = packed_groups(*[like.new_zeros(B, HK, groups * GROUP, D)] * 2, bits)
    own = (torch.zeros(B, HK, SINKS + GROUP, size, dtype=torch.uint8, device=like.device) for size in (D, D, D // 4))
    return PackedKeyValues(*packed, *own, torch.zeros(B, dtype=torch.int32, device=like.device))


def tokens(T: int, D: int, dtype: torch.dtype, B: int = 2, HQ: int = 6, HK: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, HQ, T, D] and k, v [B, HK, T, D], rounded as a cache takes them in."""
    generator = torch.Generator().manual_seed(T + D)
    q, k, v = (torch.randn(B, heads, T, D, generator=generator) for heads in (HQ, HK, HK))
    k[..., 3] += 5.0
    return 2 * q.to(DEVICE, dtype), *(rounded_tokens(x.to(DEVICE, dtype)) for x in (k, v))  # type: ignore[return-value]


def definition(
    q: Tensor, k: Tensor, v: Tensor, bits: int, window: int, sinks: int, limit: int, cap: float | None, last: int = 1
) -> tuple[Tensor, Tensor]:
    """The attention in float64 of the last tokens, of one group: that and the first tokens as in k and v, the others
    rounded."""
    length, dtype = k.shape[2], k.dtype
    own = (length - 1) // GROUP * GROUP
    rounded_k, rounded_v = k.clone(), v.clone()
    for start in range(0, own, GROUP):
        at = slice(start, start + GROUP)
        rounded_k[:, :, at] = restored(*quantised(k[:, :, at].mT, bits), bits, dtype).mT
        parts = v[:, :, at].unflatten(-1, (-1, min(GROUP, v.shape[-1])))
        rounded_v[:, :, at] = restored(*quantised(parts, bits), bits, dtype).flatten(-2)
    rounded_k[:, :, :SINKS], rounded_v[:, :, :SINKS] = k[:, :, :SINKS], v[:, :, :SINKS]
    j = torch.arange(length, device=k.device)
    i = j[-last:, None]
    seen = (j <= i) & (i - j < limit) & ((i - j < window) | (j < sinks))
    repeats = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(repeats, 1) for x in (rounded_k, rounded_v))
    scores = q[:, :, -last:].double() @ keys.mT * 0.2
    scores = scores if cap is None else cap * (scores / cap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ values, scores.logsumexp(-1).squeeze(-1)
