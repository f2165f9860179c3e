"""Attention that sees earlier keys and values as a cache of few bits will hold them.

Keys are quantised per channel over groups of `GROUP` tokens, because a few channels of all keys are large, and values
per token over groups of `GROUP` channels (KIVI, arXiv 2402.02750), on even steps from the lowest to the highest number
of a group. A query sees the keys and values of its own group of tokens, and the sinks, as they are: the groups before
it are complete. So what a query sees depends on its sequence only, and not on how the sequence was cut into calls.

Gradients pass the rounding unchanged (straight-through), so that a model can be trained through its cache.

Shapes: B batch, T tokens, HQ and HK query and key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deltanet_kernels import pack_prompt, prompt_attention
from deltanet_kernels.packed_cache.calls import PackPromptCall, PromptAttentionCall
from deltanet_kernels.packed_cache.layout import GROUP, PACKED_BITS, SINKS, quantised, restored
from deltanet_kernels.packed_cache.reference import torch_prompt_attention


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    sinks: int,
    scale: float,
    bits: int,
    softcap: float | None = None,
    packed: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`window_attention` with earlier groups in `bits` bits; q [B, T, HQ, D], k, v [B, T, HK, D], one sequence a row.

    Args:
        window: the most recent tokens that a query sees, itself included.
        packed: the keys and values that `pack_prompt` restores, where they are known.

    Returns:
        The output [B, T, HQ, D] and the log-sum-exp of the scores [B, T, HQ] float32.
    """
    if bits not in PACKED_BITS or (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))):
        keys, values = stored_keys(k, bits), stored_values(v, bits)
        return torch_prompt_attention(PromptAttentionCall(q, k, v, keys, values, window, sinks, scale, softcap))
    keys, values = pack_prompt.unchecked(PackPromptCall(k, v, bits))[1:] if packed is None else packed
    return prompt_attention.unchecked(PromptAttentionCall(q, k, v, keys, values, window, sinks, scale, softcap))
