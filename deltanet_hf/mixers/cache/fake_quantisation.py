"""Attention that sees earlier keys and values as a cache of few bits will hold them.

Keys are quantised per channel over groups of `GROUP` tokens, because a few channels of all keys are large, and values
per token over groups of `GROUP` channels (KIVI, arXiv 2402.02750), on even steps that reach from the lowest to the
highest number of a group. Before that, each token is rounded to 8 bits, with a scale for 16 channels that is a power of
two (`PackedKeyValues`). A query sees its own group of tokens, and the sinks, in these 8 bits: the groups before it are
complete. So what a query sees depends on its sequence only, and not on how it was cut into calls.

Gradients pass the rounding unchanged (straight-through), so that a model can be trained through its cache.

Shapes: B batch, T tokens, HQ and HK query and key/value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from deltanet_kernels import pack_prompt, prompt_attention, round_tokens
from deltanet_kernels.packed_cache.calls import PackPromptCall, PromptAttentionCall, RoundTokensCall
from deltanet_kernels.packed_cache.layout import GROUP, PACKED_BITS, SINKS, quantised, restored


def fake_quantised(x: Tensor, bits: int) -> Tensor:
    """The numbers x [..., G] as `packed_cache.layout` stores and restores them in `bits` bits."""
    return restored(*quantised(x, bits), bits, x.dtype)


def quantised_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    sinks: int,
    scale: float,
    bits: int,
    softcap: float | None = None,
    key_order: Tensor | None = None,
    edge: int = 1,
) -> tuple[Tensor, Tensor]:
    """`window_attention` with earlier groups in `bits` bits; q [B, T, HQ, D], k, v [B, T, HK, D], one sequence a row.

    Args:
        window: the most recent tokens that a query sees, itself included.
        key_order: that of 4 bits (`PackedKeyValues`), or None.
        edge: as in `window_attention`.

    Returns:
        The output [B, T, HQ, D] and the log-sum-exp of the scores [B, T, HQ] float32.
    """
    k, v, seen = as_kept(k, v, bits, key_order)
    return prompt_attention.unchecked(PromptAttentionCall(q, k, v, *seen, window, sinks, scale, softcap, edge))


def as_kept(k: Tensor, v: Tensor, bits: int, key_order: Tensor | None) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """k, v [B, T, HK, D] as queries of the same group see them, and [B, N * 32, HK, D] as those of later groups do."""
    k, v = round_tokens.unchecked(RoundTokensCall(k, v))
    return k, v, _seen(k.detach(), v.detach(), bits, key_order)


def straight_through(x: Tensor, seen: Tensor) -> Tensor:
    """x [B, T, HK, D] with the numbers of `seen` [B, N * 32, HK, D] where it reaches, and gradients of x."""
    return x + F.pad(seen - x[:, : seen.shape[1]].detach(), (0, 0, 0, 0, 0, x.shape[1] - seen.shape[1]))


def _seen(k: Tensor, v: Tensor, bits: int, key_order: Tensor | None) -> tuple[Tensor, Tensor]:
    """Round k and v [B, T, HK, D] of the groups before the last token, as later groups see them: [B, N * 32, HK, D]."""
    if bits in PACKED_BITS:
        return pack_prompt.unchecked(PackPromptCall(k, v, bits, key_order=key_order))[1:]
    return _seen_keys(k, bits), _seen_values(v, bits)


def _seen_keys(k: Tensor, bits: int) -> Tensor:
    groups = k[:, : (k.shape[1] - 1) // GROUP * GROUP].unflatten(1, (-1, GROUP)).transpose(2, -1)
    return _with_sinks(k, fake_quantised(groups, bits).transpose(2, -1).flatten(1, 2))  # from [B, N, D, HK, 32]


def _seen_values(v: Tensor, bits: int) -> Tensor:
    groups = v[:, : (v.shape[1] - 1) // GROUP * GROUP].unflatten(-1, (-1, min(GROUP, v.shape[-1])))
    return _with_sinks(v, fake_quantised(groups, bits).flatten(-2))


def _with_sinks(x: Tensor, rounded: Tensor) -> Tensor:
    """The rounded numbers of [B, N * 32, HK, D], of sinks those of x."""
    return torch.cat([x[:, : min(SINKS, rounded.shape[1])], rounded[:, SINKS:]], dim=1)
