"""The only sequential part of the chunk forms: the state before every chunk from what each chunk does to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _StateScan(torch.autograd.Function):
    """A Function of its own, because autograd through the loop would copy all gradients at every chunk."""

    @staticmethod
    def forward(
        ctx: Any, transition: Tensor, written: Tensor, initial: Tensor, counts: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        states, state, first = torch.empty_like(written), initial.clone(), 0
        for count in counts:
            here = slice(first, first + count)
            states[here] = state[:count]
            state[:count] = _apply(transition[here], state[:count]) + written[here]
            first += count
        ctx.counts = counts
        ctx.save_for_backward(transition, states)
        return states, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dstates: Tensor, dfinal: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        transition, states = ctx.saved_tensors
        dwritten, dstate, end = torch.empty_like(states), dfinal.clone(), states.shape[0]
        for count in reversed(ctx.counts):
            here = slice(end - count, end)
            dwritten[here] = dstate[:count]
            dstate[:count] = _apply(transition[here].mT, dstate[:count]) + dstates[here]
            end -= count
        if transition.shape[-1] == 1:
            dtransition = (dwritten * states).sum((-2, -1), keepdim=True)
        else:
            dtransition = dwritten @ states.mT
        return dtransition, dwritten, dstate, None


def _apply(transition: Tensor, state: Tensor) -> Tensor:
    return transition * state if transition.shape[-1] == 1 else transition @ state


def state_scan(transition: Tensor, written: Tensor, initial: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """S_{c+1} = A_c S_c + N_c for every chunk c, in the order of a `ChunkLayout`; differentiable once.

    Args:
        transition: A, [M, H, K, K] for matrices (K > 1) or [M, H, 1, 1] for factors.
        written: N, [M, H, K, V].
        initial: the states before the first chunks [N, H, K, V].
        counts: number of chunks with each chunk number, as in `ChunkLayout`.

    Returns:
        The state before every chunk [M, H, K, V], and the states after the last chunk of each sequence [N, H, K, V].
    """
    return _StateScan.apply(transition, written, initial, counts)  # type: ignore[no-any-return]


def segment_decay(g: Tensor) -> Tensor:
    """e^{g_{s+1} + ... + g_t} for s <= t, else 0: [..., C] -> [..., C, C], rows t.

    Every sum is formed by itself and not as a difference of two, so it is exact beside gates of any size, also -inf.
    """
    size = g.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=g.device).tril(-1)
    sums = g.unsqueeze(-1).expand(*g.shape, size).masked_fill(~later, 0.0).cumsum(-2)
    return sums.masked_fill(later.mT, -torch.inf).exp()
