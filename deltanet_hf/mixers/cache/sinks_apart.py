"""Sinks that a query sees otherwise than other tokens: their part of the softmax, computed apart.

A window's kernel gives attention and log-sum-exp of the window alone; the few sinks are added by theirs. In a model
that reads further than its teacher, sinks are seen as from a bounded position, which the teacher knows: the query of a
position p is turned back from p to min(p, bound) before it meets them (`layer/layer_call.py`).

Learned sinks (gpt-oss) are numbers: the softmax of a head has one more score b, which belongs to no token. With Z the
sum of exponentials of the others, an attention w becomes w Z / (Z + exp(b)).

Shapes: B batch, T tokens, S sinks, HQ and HK query and key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass  # not frozen: torch.compile in torch 2.11 cannot call an instance of a frozen data class
class Scores:
    """How products of queries and keys become scores."""

    scale: float
    softcap: float | None

    def __call__(self, products: Tensor) -> Tensor:
        scores = products * self.scale
        return scores if self.softcap is None else self.softcap * (scores / self.softcap).tanh()


def leaves_out(numbers: Tensor, sinks: int, window: int, edge: int) -> Tensor:
    """[B or 1, T, S] bool: the sinks that lie before the windows of tokens.

    Args:
        numbers: of the tokens in their sequences [B or 1, T], from 1; 0 for padding.
        sinks: S.
        window, edge: as for `window_attention`.
    """
    begin = (numbers - 1) // edge * edge + 1
    return begin.unsqueeze(2) - torch.arange(1, sinks + 1, device=numbers.device) >= window


def with_sinks(
    near: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Attention to a window and sinks [B, T, HQ, D], and its log-sum-exp [B, T, HQ].

    Args:
        near: the attention to the window alone [B, T, HQ, D].
        lse: the log-sum-exp of its scores [B, T, HQ], float32 at least.
        q: the queries as the sinks see them.
        k, v: of the sinks, [B, S, HK, D]; or those of each query, [B, T, S, HK, D].
        seen: [B or 1, T, S] bool, the sinks that a query sees outside of its window.
    """
    sinks = "bshd" if k.dim() == 4 else "btshd"
    grouped = q.unflatten(2, (k.shape[-2], -1)).to(lse.dtype)
    logits = scores(torch.einsum(f"bthgd,{sinks}->bthgs", grouped, k.to(lse.dtype)))
    logits = logits.masked_fill(~seen[:, :, None, None], -torch.inf).flatten(2, 3)
    total = torch.cat([lse.unsqueeze(-1), logits], dim=-1).logsumexp(-1, keepdim=True)
    weights = (logits - total).exp().unflatten(2, (k.shape[-2], -1))
    far = torch.einsum(f"bthgs,{sinks}->bthgd", weights, v.to(lse.dtype)).flatten(2, 3)
    return ((lse.unsqueeze(-1) - total).exp() * near + far).to(near.dtype), total.squeeze(-1)


def with_learned_sinks(output: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp with sinks, from those without.

    Args:
        output: [..., HQ, D]; lse: log Z [..., HQ] float32; sinks: b [HQ], or None for none.
    """
    if sinks is None:
        return output, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    return output * (lse - total).exp().unsqueeze(-1).to(output.dtype), total
