"""Attention over window and sinks with a T x T mask, in the dtype of its inputs: the tests' ground truth."""

import torch

from deltanet_kernels.signatures import by_arguments
from deltanet_kernels.window.calls import WindowCall


@by_arguments(WindowCall)
def naive_window_attention(call: WindowCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`deltanet_kernels.window_attention` by its definition, differentiable; lse in the dtype of q."""
    q, k, v, window, sinks, _, cu_seqlens, softcap, edge = call
    (_, T, HQ, _), HK = q.shape, k.shape[2]
    i = torch.arange(T, device=q.device)
    bounds = torch.tensor([0, T]) if cu_seqlens is None else cu_seqlens
    start, real = torch.zeros_like(i), torch.zeros_like(i, dtype=torch.bool)
    for first, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        start[first:stop], real[first:stop] = first, True
    j, position = i[None, :], i - start
    seen = (j <= i[:, None]) & (start[None, :] == start[:, None]) & real & real[:, None]
    first = (start + position // edge * edge)[:, None]
    seen &= (first - j < window) | (position[None, :] < sinks)
    k, v = (x.repeat_interleave(HQ // HK, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * call.factor
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~(seen | torch.eye(T, dtype=torch.bool, device=q.device)), -torch.inf)
    lse = scores.logsumexp(dim=-1)
    o = torch.einsum("bhij,bjhd->bihd", (scores - lse.unsqueeze(-1)).exp(), v)
    unreal = ~real[None, :, None]
    return o.masked_fill(unreal.unsqueeze(-1), 0.0), lse.transpose(1, 2).masked_fill(unreal, 0.0)
