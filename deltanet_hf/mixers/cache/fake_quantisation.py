"""Attention that sees earlier keys and values as a cache of few bits will hold them.

Keys are quantised per channel over groups of `GROUP` tokens, because a few channels of all keys are large, and values
per token over groups of `GROUP` channels (KIVI, arXiv 2402.02750), on even steps from the lowest to the highest number
of a group. A query sees the keys and values of its own group of tokens, and the sinks, as they are: the groups before
it are complete. So what a query sees depends on its sequence only, and not on how the sequence was cut into calls.

Gradients pass the rounding unchanged (straight-through), so that a model can be trained through its cache.

Shapes: B batch, T tokens, HQ and HK query and key/value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from deltanet_kernels import window_attention
from deltanet_kernels.packed_cache.layout import GROUP, SINKS, quantised, restored


def fake_quantised(x: Tensor, bits: int) -> Tensor:
    """The numbers x [..., G] as `packed_cache.layout` stores and restores them in `bits` bits."""
    return restored(*quantised(x, bits), x.dtype)


def stored_keys(k: Tensor, bits: int) -> Tensor:
    """Keys [B, T, HK, D] as queries of later groups see them; an unfinished group and the sinks stay as they are."""
    length = k.shape[1] // GROUP * GROUP
    groups = k.detach()[:, :length].unflatten(1, (-1, GROUP)).transpose(2, -1)  # [B, N, D, HK, GROUP]
    rounded = fake_quantised(groups, bits).transpose(2, -1).flatten(1, 2)
    return _straight_through(k, torch.cat([k[:, :SINKS], rounded[:, SINKS:], k[:, max(length, SINKS) :]], dim=1))


def stored_values(v: Tensor, bits: int) -> Tensor:
    """Values [B, T, HK, D] as queries of later groups see them; an unfinished group and the sinks stay as they are."""
    length, size = v.shape[1] // GROUP * GROUP, min(GROUP, v.shape[-1])
    rounded = fake_quantised(v.detach()[:, :length].unflatten(-1, (-1, size)), bits).flatten(-2)
    return _straight_through(v, torch.cat([v[:, :SINKS], rounded[:, SINKS:], v[:, max(length, SINKS) :]], dim=1))


def _straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    return x + (rounded.detach() - x.detach())


def quantised_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, sinks: int, scale: float, bits: int, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """`window_attention` with earlier groups in `bits` bits; q [B, T, HQ, D], k, v [B, T, HK, D], one sequence a row.

    Attention to the rounded keys and values of all tokens comes first; then, within each group, the terms of its
    rounded keys and values are exchanged for those of the exact ones.

    Args:
        window: the most recent tokens that a query sees, itself included.

    Returns:
        The output [B, T, HQ, D] and the log-sum-exp of the scores [B, T, HQ] float32.
    """
    length, wide = q.shape[1], torch.promote_types(q.dtype, torch.float32)
    keys, values = stored_keys(k, bits), stored_values(v, bits)
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
