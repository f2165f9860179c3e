"""Packed caches and tokens that the tests of them share, and the definition of their attention in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from deltanet_kernels import PackedKeyValues
from deltanet_kernels.packed_cache.layout import GROUP, SINKS, packed_groups, quantised, restored, rounded_tokens
from tests.kernels.triton_mode import DEVICE


def key_order(D: int, HK: int = 2) -> Tensor:
    """Another order for each head."""
    generator = torch.Generator().manual_seed(D)
    order = torch.stack([torch.randperm(D, generator=generator) for _ in range(HK)])
    return torch.stack([order, order.argsort()], dim=1).to(DEVICE)


def key_bits(order: Tensor) -> Tensor:
    """[HK, D] the bits of each channel."""
    place, half = order[:, 1], order.shape[2] // 2
    return torch.where(place >= half, 4, torch.where(place % 4 < 2, 5, 3))


def empty(like: Tensor, groups: int, bits: int, order: Tensor | None = None) -> PackedKeyValues:
    B, HK, _, D = like.shape
    packed = packed_groups(*[like.new_zeros(B, HK, groups * GROUP, D)] * 2, bits, order)
    own = (torch.zeros(B, HK, SINKS + GROUP, size, dtype=torch.uint8, device=like.device) for size in (D, D, D // 4))
    return PackedKeyValues(*packed, *own, torch.zeros(B, dtype=torch.int32, device=like.device), order)


def tokens(T: int, D: int, dtype: torch.dtype, B: int = 2, HQ: int = 6, HK: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, HQ, T, D] and k, v [B, HK, T, D], rounded as a cache takes them in."""
    generator = torch.Generator().manual_seed(T + D)
    q, k, v = (torch.randn(B, heads, T, D, generator=generator) for heads in (HQ, HK, HK))
    k[..., 3] += 5.0
    return 2 * q.to(DEVICE, dtype), *(rounded_tokens(x.to(DEVICE, dtype)) for x in (k, v))  # type: ignore[return-value]


def rounded_keys(k: Tensor, bits: int, order: Tensor | None) -> Tensor:
    """Keys [B, HK, 32, D] of a group, packed and restored."""
    rounded = restored(*quantised(k.mT, bits), bits, k.dtype).mT.clone()
    if order is not None:
        for head, widths in enumerate(key_bits(order)):
            for width in (3, 4, 5):
                some = (widths == width).nonzero()[:, 0]
                rounded[:, head, :, some] = restored(*quantised(k[:, head, :, some].mT, width), width, k.dtype).mT
    return rounded


def definition(
    q: Tensor, k: Tensor, v: Tensor, bits: int, window: int, sinks: int, limit: int, cap: float | None, last: int = 1,
    order: Tensor | None = None, first_q: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The attention in float64 of the last tokens, of one group: that and the first tokens as in k and v, the others
    rounded. With `first_q`, as q, the first four tokens meet these queries."""
    length, dtype = k.shape[2], k.dtype
    own = (length - 1) // GROUP * GROUP
    rounded_k, rounded_v = k.clone(), v.clone()
    for start in range(0, own, GROUP):
        at = slice(start, start + GROUP)
        rounded_k[:, :, at] = rounded_keys(k[:, :, at], bits, order)
        parts = v[:, :, at].unflatten(-1, (-1, min(GROUP, v.shape[-1])))
        rounded_v[:, :, at] = restored(*quantised(parts, bits), bits, dtype).flatten(-2)
    rounded_k[:, :, :SINKS], rounded_v[:, :, :SINKS] = k[:, :, :SINKS], v[:, :, :SINKS]
    j = torch.arange(length, device=k.device)
    i = j[-last:, None]
    seen = (j <= i) & (i - j < limit) & ((i - j < window) | (j < sinks))
    repeats = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(repeats, 1) for x in (rounded_k, rounded_v))
    scores = q[:, :, -last:].double() @ keys.mT * 0.2
    if first_q is not None:
        scores[..., :SINKS] = first_q[:, :, -last:].double() @ keys[:, :, :SINKS].mT * 0.2
    scores = scores if cap is None else cap * (scores / cap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ values, scores.logsumexp(-1).squeeze(-1)
