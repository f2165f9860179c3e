"""The recurrences one token at a time, as their definitions state them: the truth for tests.

All functions take q, k [B, T, H, K], v [B, T, H, V], a log decay g [B, T, H] and a state [B, H, K, V] (None: zeros), in
one dtype, and return o [B, T, H, V] and the last state. Queries and keys are used as they are, and the output is
multiplied by `scale`, K**-0.5 by default. They are differentiable by autograd, slow, and with float64 exact to float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Step = Literal["exact", "implicit", "explicit"]


def _scan(
    q: Tensor, v: Tensor, state: Tensor | None, scale: float | None, advance: Callable[[Tensor, int], Tensor]
) -> tuple[Tensor, Tensor]:
    """Applies `advance(state, t)` token by token and reads the state with q after each."""
    S = v.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]) if state is None else state
    outputs = []
    for t in range(q.shape[1]):
        S = advance(S, t)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    factor = q.shape[3] ** -0.5 if scale is None else scale
    return factor * torch.stack(outputs, dim=1), S


def _outer(k: Tensor, v: Tensor) -> Tensor:
    return k.unsqueeze(-1) * v.unsqueeze(-2)


def _read(k: Tensor, state: Tensor) -> Tensor:
    return torch.einsum("bhk,bhkv->bhv", k, state)


def naive_additive(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """S_t = exp(g_t) S_{t-1} + beta_t k_t v_t^T with a write strength beta [B, T, H].

    Linear attention (arXiv 2006.16236) with g = 0, retention (arXiv 2307.08621) with a constant g, and the recurrence
    of Mamba-2 (arXiv 2405.21060).
    """

    def advance(S: Tensor, t: int) -> Tensor:
        return g[:, t, :, None, None].exp() * S + _outer(k[:, t], beta[:, t, :, None] * v[:, t])

    return _scan(q, v, state, scale, advance)


def naive_flow(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    eta: Tensor,
    step: Step = "exact",
    state: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """A step of length eta_t along dS/ds = k_t (v_t - k_t^T S)^T from exp(g_t) S_{t-1}; eta [B, T, H].

    exact: by the exponential of the extended matrix [[-k k^T, k v^T], [0, 0]] (EFLA, arXiv 2512.12602); implicit: by
    solving (I + eta k k^T) S_t = S + eta k v^T; explicit: Euler's step, which is the delta rule with strength eta.
    """
    K, V = k.shape[-1], v.shape[-1]

    def advance(S: Tensor, t: int) -> Tensor:
        S, size = g[:, t, :, None, None].exp() * S, eta[:, t, :, None, None]
        erase, write = _outer(k[:, t], k[:, t]), _outer(k[:, t], v[:, t])
        if step == "explicit":
            return S - size * (erase @ S) + size * write
        if step == "implicit":
            return torch.linalg.solve(torch.eye(K, dtype=S.dtype) + size * erase, S + size * write)
        system = torch.cat([torch.cat([-erase, write], -1), S.new_zeros(*S.shape[:2], V, K + V)], -2)
        flow = torch.linalg.matrix_exp(size * system)
        return flow[..., :K, :K] @ S + flow[..., :K, K:]

    return _scan(q, v, state, scale, advance)


def naive_undecayed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    eta: Tensor,
    erase_key: Tensor,
    state: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = exp(g_t) S_{t-1} + k_t eta_t (v_t - p_t^T S_{t-1})^T: what is erased was read before the decay.

    The recurrence of Comba (arXiv 2506.02475), with eta [B, T, H] and erase keys p [B, T, H, K].
    """

    def advance(S: Tensor, t: int) -> Tensor:
        missed = v[:, t] - _read(erase_key[:, t], S)
        return g[:, t, :, None, None].exp() * S + _outer(k[:, t], eta[:, t, :, None] * missed)

    return _scan(q, v, state, scale, advance)


def naive_normalised_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} + k_t beta_t (v_t - S_{t-1}^T k_t / d_t)^T, d_t = k_t^T (k_1 + ... + k_{t-1}); from zero states.

    The delta rule on normalised reads; keys have only positive channels, and d_1 = 1.
    """
    sums = k.cumsum(1) - k

    def advance(S: Tensor, t: int) -> Tensor:
        d = (k[:, t] * sums[:, t]).sum(-1, keepdim=True) if t else torch.ones_like(beta[:, t, :, None])
        return S + _outer(k[:, t], beta[:, t, :, None] * (v[:, t] - _read(k[:, t], S) / d))

    return _scan(q, v, state, scale, advance)
