"""Brings the heads of q, k and v to the states, for operators in PyTorch."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

L2_EPS = 1e-6


def l2_normalize(x: Tensor) -> Tensor:
    """x * rsqrt(sum x^2 + 1e-6) over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def to_states(q: Tensor, k: Tensor, v: Tensor, normalize: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in `dtype` with one key head per state, q and k of unit length if `normalize`.

    Args:
        q, k, v: [B, T, HQ, K], [B, T, H, K], [B, T, HV, V]; H divides HV, and HQ divides HV or HV divides HQ.

    Returns:
        q [B, T, HV*R, K] with R consecutive query heads per state, k [B, T, HV, K], v [B, T, HV, V].
    """
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if normalize:
        q, k = l2_normalize(q), l2_normalize(k)
    states = v.shape[2]
    if q.shape[2] < states:
        q = q.repeat_interleave(states // q.shape[2], dim=2)
    if k.shape[2] < states:
        k = k.repeat_interleave(states // k.shape[2], dim=2)
    return q, k, v


def repeated(x: Tensor, size: int, times: int) -> Tensor:
    """x [B, T, heads*size] with each head `times` times."""
    return x.unflatten(-1, (-1, size)).repeat_interleave(times, dim=2).flatten(2) if times > 1 else x


def stack_queries(q: Tensor, states: int) -> Tensor:
    """[M, HV*R, C, K] -> [M, HV, R*C, K]: the queries of a state as rows of one matrix."""
    return q.unflatten(1, (states, -1)).flatten(2, 3)


def unstack_queries(o: Tensor, size: int) -> Tensor:
    """[M, HV, R*C, V] -> [M, HV*R, C, V], with C = `size`."""
    return o.unflatten(2, (-1, size)).flatten(1, 2)


def spans(batch: int, tokens: int, cu_seqlens: Tensor | None) -> list[tuple[slice, int, int]]:
    """The spans (rows, first token, end) of a loop over tokens: the whole batch, or one packed sequence each."""
    if cu_seqlens is None:
        return [(slice(0, batch), 0, tokens)]
    return [(slice(n, n + 1), start, end) for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist()))]
