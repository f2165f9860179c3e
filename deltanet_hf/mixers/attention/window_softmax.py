"""The softmax of attention under a window and sinks, by the operator `window_attention` or with a mask.

Shapes: B batch, T tokens of a call, N tokens with those from the cache, HQ and HK query and key/value heads, D head
size, S sinks.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from deltanet_hf.mixers.cache.sinks_apart import Scores, with_sinks
from deltanet_hf.mixers.cache.window_cache import Tokens
from deltanet_hf.mixers.layer.token_order import few_queries, in_order
from deltanet_kernels import window_attention
from deltanet_kernels.common.rotation import turned
from deltanet_kernels.flash_decoding.calls import DecodeAttentionCall
from deltanet_kernels.flash_decoding.reference import torch_decode_attention


@dataclass(frozen=True)
class Reach:
    """Which tokens a query sees."""

    window: int
    sinks: int
    family_window: int | None  # the family's own, beyond which sinks are not seen either


@dataclass  # not frozen: torch.compile in torch 2.11 cannot call an instance of a frozen data class
class SoftmaxCall:
    """One call of a layer under a window, without q, k and v."""

    tokens: Tokens  # the queries
    seen: Tokens  # the keys
    reach: Reach
    cu_seqlens: Tensor | None  # [N + 1] boundaries of packed sequences over the B*T tokens
    in_order: bool  # no padding, and no tokens from the cache
    eager: bool  # the implementation that the model asks for is "eager" and not "sdpa"
    weights: bool  # whether the attention weights are wanted
    turn: tuple[Tensor, Tensor] | None = None  # cos and sin [B or 1, T, R] by which queries turn back for the sinks

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The attention.

        Args:
            module: the family's attention.
            query, key, value: [B, HQ, T, D], [B, HK, N, D], [B, HK, N, D].

        Returns:
            [B, T, HQ, D], and the weights [B, HQ, T, N] if they were computed.
        """
        has_sinks = kwargs.get("s_aux") is not None  # which the family's eager attention knows
        eager = self.eager or softcap is not None or has_sinks  # SDPA has neither cap nor learned sinks
        if dropout == 0 and not (self.weights and eager) and not has_sinks and operator_pays(self, query):
            q, k, v = (states.transpose(1, 2).to(value.dtype) for states in (query, key, value))
            scores = Scores(query.shape[-1] ** -0.5 if scaling is None else float(scaling), softcap)
            q = q if self.turn is None else torch.cat([q, turned(q, self.turn)], dim=2)
            return _by_operator(q, k, v, self, scores).contiguous(), None
        mask = self.tokens.sees(self.seen, self.reach.window, self.reach.sinks, self.reach.family_window).unsqueeze(1)
        if self.turn is not None:
            scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
            query, key = _side_by_side(query, key, self, self.turn)
        options = {"scaling": scaling, "dropout": dropout, **kwargs}
        if not eager and query.shape[2] == 1 and not query.is_cuda and dropout == 0 and self.turn is None:
            # With a mask, SDPA would want a copy of keys and values for every query head.
            return torch_decode_attention(DecodeAttentionCall(query, key, value, mask, scaling)).transpose(1, 2), None
        if not eager:
            return sdpa_attention_forward(module, query, key, value, mask, **options)  # type: ignore[no-any-return]
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
        by_family: Any = sys.modules[type(module).__module__]
        capped = {} if softcap is None else {"softcap": softcap}
        return by_family.eager_attention_forward(module, query, key, value, mask, **options, **capped)  # type: ignore[no-any-return]


def _side_by_side(query: Tensor, key: Tensor, call: SoftmaxCall, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Queries [B, HQ, T, 2 D], as they are and turned, and keys [B, HK, N, 2 D]; sinks meet the turned ones."""
    numbers = call.seen.numbers[:, None, :, None]
    sink = (numbers > 0) & (numbers <= call.reach.sinks)
    back = turned(query.transpose(1, 2), turn).transpose(1, 2)
    return torch.cat([query, back], dim=-1), torch.cat([key.masked_fill(sink, 0), key.masked_fill(~sink, 0)], dim=-1)


def operator_pays(call: SoftmaxCall, query: Tensor) -> bool:
    """Whether `window_attention` is the smaller or faster form for queries [B, HQ, T, D].

    On a GPU it always is, but for the few queries of a decoding step. On a CPU it is for whole sequences without
    gradients, and of `blocks_pay`.
    """
    length = query.shape[2]
    if not query.is_cuda:
        gradients = torch.is_grad_enabled() and query.requires_grad
        return (call.in_order and length > 1 and not gradients) or blocks_pay(call.reach.window, length)
    return length > (1 if call.in_order else few_queries(call.reach.window, query))


def blocks_pay(window: int, length: int) -> bool:
    """Whether `window_attention` is the faster form on a CPU with gradients, for sequences of `length` tokens.

    SDPA with a mask over all pairs of tokens is faster up to about eight windows: with 9 heads of 64 channels and one
    thread, forward and backward pass take 27 against 22 ms at a window of 64 and 512 tokens, 420 against 402 ms at 256
    and 2,048 tokens, and 27 against 86 ms at 256 and 512.
    """
    return length >= 8 * max(window, 64)


def _by_operator(q: Tensor, k: Tensor, v: Tensor, call: SoftmaxCall, scores: Scores) -> Tensor:
    """Attention [B, T, HQ, D] of q [B, T, HQ, D] to k and v [B, N, HK, D].

    With a turn, q [B, T, 2 HQ, D] are the queries and, behind them, the turned ones.
    """
    if call.cu_seqlens is not None:
        shape, numbers = q.shape, call.tokens.numbers.reshape(1, -1)
        q, k, v = (states.flatten(0, 1).unsqueeze(0) for states in (q, k, v))
        return _ordered(q, k, v, numbers, call, scores).view(*shape[:2], -1, shape[3])
    if call.in_order:
        return _ordered(q, k, v, call.tokens.numbers, call, scores)

    def ordered(q: Tensor, k: Tensor, v: Tensor, numbers: Tensor) -> tuple[Tensor]:
        return (_ordered(q, k, v, numbers, call, scores),)

    return in_order(ordered, q, k, v, call.seen)[0]


def _ordered(q: Tensor, k: Tensor, v: Tensor, numbers: Tensor, call: SoftmaxCall, scores: Scores) -> Tensor:
    """Attention [B, N, HQ, D] among tokens in the order of their numbers [B or 1, N] in their sequences."""
    window, sinks, limit = call.reach.window, call.reach.sinks, call.reach.family_window
    q, back = (q, q) if call.turn is None else q.chunk(2, dim=2)
    if limit is not None and limit <= window:
        window, sinks = limit, 0
    limited = limit is not None and not (call.in_order and q.shape[1] <= limit)
    apart = sinks > 0 and (limited or call.turn is not None)
    seen = 0 if apart else sinks
    near, lse = window_attention(q, k, v, window, seen, scores.scale, call.cu_seqlens, scores.softcap)
    return _with_sinks_apart(back, k, v, numbers, call, scores, near, lse) if apart else near


def _with_sinks_apart(
    q: Tensor, k: Tensor, v: Tensor, numbers: Tensor, call: SoftmaxCall, scores: Scores, near: Tensor, lse: Tensor
) -> Tensor:
    """Adds the sinks that a family's own window still shows to attention `near` [B, N, HQ, D] over the window alone.

    The operator shows sinks at any distance. `lse` [B, N, HQ] is the log-sum-exp of its scores, and q as for the sinks.
    """
    reach, length = call.reach, q.shape[1]
    count = min(reach.sinks, length)
    if call.cu_seqlens is None:
        k, v, sinks = k[:, :count], v[:, :count], numbers[:, None, :count]
    else:  # those of each token's own sequence; places behind its end are masked
        sinks = torch.arange(1, count + 1, device=q.device)
        places = torch.arange(length, device=q.device)[:, None] - numbers[0, :, None] + sinks
        k, v = (states[:, places.clamp(max=length - 1)] for states in (k, v))
    distance = numbers.unsqueeze(-1) - sinks
    seen = (distance >= reach.window) & (sinks > 0) & (sinks <= reach.sinks)
    if reach.family_window is not None:
        seen = seen & (distance < reach.family_window)
    return with_sinks(near, lse, q, k, v, seen, scores)[0]
