"""Brings rows with padding, or with tokens from the cache in front, into the order that operators expect.

Shapes: B batch, T tokens of a call, N tokens with those from the cache, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deltanet_hf.mixers.cache.window_cache import Tokens

FEW = 64  # queries for which a mask on a GPU takes less than ordering all tokens of the cache


def few_queries(window: int, like: Tensor) -> int:
    """The greatest number of queries that a mask should serve, where the alternative is `in_order`.

    On a CPU blocks of `window_attention` are as wide as the window, so that below it a mask is never the larger part.
    """
    return min(window, FEW) if like.is_cuda else window


def in_order(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]],
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tokens,
) -> tuple[Tensor, ...]:
    """Calls `attend` with the tokens in the order of their numbers, and takes its results back into that of q.

    Behind one another, with empty places and padding at the end, tokens are one sequence. It lacks tokens that no
    query sees: those between the sinks and the window of the first query.

    Args:
        attend: takes q, k and v [B, N, heads, D] and the numbers [B, N] of the tokens (0 for none); returns
            tensors [B, N, ...].
        q: queries [B, T, H, D], those of the last T keys.
        keys, values: [B, N, HK, D].
        seen: the numbers of the keys.

    Returns:
        The results of `attend` for the queries, [B, T, ...].
    """
    batch, length = q.shape[:2]
    front = keys.shape[1] - length
    q = torch.cat([q.new_zeros(batch, front, *q.shape[2:]), q], dim=1)
    numbers = seen.numbers.expand(batch, -1)
    order = torch.where(numbers > 0, numbers, numbers.new_full((), 2**30)).argsort(dim=1, stable=True)
    place = order.argsort(dim=1)
    results = attend(*(reordered(tensor, order) for tensor in (q, keys, values, numbers)))
    return tuple(reordered(tensor, place)[:, front:] for tensor in results)


def reordered(tensor: Tensor, order: Tensor) -> Tensor:
    """The tokens of tensor [B, N, ...] at the places `order` [B, M], in this order: [B, M, ...]."""
    return tensor.gather(1, along(order, tensor))


def placed(tensor: Tensor, at: Tensor, places: int) -> Tensor:
    """The tokens of tensor [B, T, ...] in the places `at` [B, T] of [B, places, ...], and zeros elsewhere.

    Tokens whose place is `places` are left out.
    """
    room = tensor.new_zeros(len(tensor), places + 1, *tensor.shape[2:])
    return room.scatter(1, along(at, tensor), tensor)[:, :-1]


def along(places: Tensor, tensor: Tensor) -> Tensor:
    """Places [B, M] as an index [B, M, ...] of the tokens of tensor [B, N, ...]."""
    return places.reshape(*places.shape, *[1] * (tensor.dim() - 2)).expand(*places.shape, *tensor.shape[2:])


def padding_last(padding: Tensor) -> tuple[Tensor, Tensor]:
    """The order [B, T] in which the tokens of each row come before its padding [B, T], and the place of each in it."""
    real = ~padding
    place = torch.where(padding, real.sum(1, keepdim=True) + padding.cumsum(1), real.cumsum(1)) - 1
    order = torch.arange(padding.shape[1], device=padding.device).expand_as(place)
    return torch.empty_like(place).scatter_(1, place, order), place
