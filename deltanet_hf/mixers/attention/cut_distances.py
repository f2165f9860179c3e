"""Softmax attention whose distances are cut: tokens further away than a limit are seen as if they were that far.

For a query at position p and a key at position j, rotated by R, the score is q^T R(min(p - j, limit - 1)) k (ReRoPE).
No query sees a distance that the teacher was not trained on, and within the limit it is the teacher's attention.

Beyond the limit a key is seen without its own rotation, so the cache holds keys before the rotation. They are rotated
when they are read, which takes a growing cache of 16 bits.

Shapes: B batch, T tokens of a call, N tokens with those from the cache, HQ and HK query and key/value heads, D head
size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

from deltanet_hf.mixers.attention.far_positions import FarSoftmax, own_attention
from deltanet_hf.mixers.cache.argument import cache_in
from deltanet_hf.mixers.layer.masks import visible
from deltanet_kernels import window_attention
from deltanet_kernels.common.rotation import rotate

IMPLEMENTATION = "deltanet_cut_distances"  # the name under which the families' attention finds `attend`
QUERIES = 256  # whose scores to all keys are in memory at a time


class CutSoftmax(FarSoftmax):
    """As the base class, with cut distances; the family's own rotation is none, and `attend` rotates.

    `rotary` is the family's rotary embedding, in a tuple, so that it does not become a submodule.
    """

    implementation = IMPLEMENTATION
    rotary: tuple[nn.Module]
    limit: int  # distances from which on all are seen as limit - 1
    layer_idx: int

    def take(self, rotary: nn.Module, limit: int) -> None:
        self.rotary, self.limit = (rotary,), limit

    def further(self, own: Tensor, call: dict[str, Any]) -> dict[str, Any]:
        cache = cache_in(call)
        seen = 0 if cache is None else cache.get_seq_length(self.layer_idx)
        return {"positions": own, "seen": seen + 0}  # static caches count in place


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    positions: Tensor,
    seen: int | Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that a family's attention calls.

    Args:
        query, key, value: [B, HQ, T, D], [B, HK, N, D], [B, HK, N, D], not rotated.
        positions: of the queries [B or 1, T].
        seen: tokens before the call, padding included.
    """
    length, held = query.shape[2], key.shape[2]
    mask = None if attention_mask is None else visible(attention_mask)
    at = _key_positions(positions, mask, held, seen)
    q, k = _rotated(module, query, positions), _rotated(module, key, at)
    if held <= module.limit:
        rest = {"scaling": scaling, "dropout": dropout, **kwargs}
        return own_attention(module)(module, q, k, value, attention_mask, **rest)  # type: ignore[no-any-return]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    far = _rotated(module, query, torch.full_like(positions, module.limit - 1))
    if attention_mask is None and length == held and dropout == 0:
        return _of_rows(q, far, k, key, value, module.limit, scale), None
    outputs = []
    for start in range(0, length, QUERIES):
        part = slice(start, start + QUERIES)
        distance = (positions[:, part].unsqueeze(2) - at.unsqueeze(1)).unsqueeze(1)
        scores = torch.where(distance < module.limit, _products(q[:, :, part], k), _products(far[:, :, part], key))
        sees = distance >= 0 if mask is None else mask[:, :, part]
        weights = (scores * scale).masked_fill(~sees, torch.finfo(scores.dtype).min).softmax(-1).to(value.dtype)
        values = repeat_kv(value, query.shape[1] // value.shape[1])
        outputs.append(F.dropout(weights, dropout) @ values)
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _key_positions(positions: Tensor, mask: Tensor | None, held: int, seen: int | Tensor) -> Tensor:
    """The positions [B or 1, N] of `held` keys; those of padding, which is not seen, may be any."""
    if positions.shape[1] == held:
        return positions
    if mask is None:
        return torch.arange(held, device=positions.device) - (seen - positions[:, :1])
    return mask[:, 0].any(1).cumsum(-1) - 1


def _rotated(module: Any, x: Tensor, positions: Tensor) -> Tensor:
    """x [B, H, T, D] at positions [B or 1, T]."""
    return rotate(x.transpose(1, 2), *module.rotary[0](x, positions)).transpose(1, 2)


def _products(q: Tensor, k: Tensor) -> Tensor:
    """[B, HQ, T, N], float32 at least."""
    products = q @ repeat_kv(k, q.shape[1] // k.shape[1]).mT
    return products.to(torch.promote_types(products.dtype, torch.float32))


def _of_rows(q: Tensor, far: Tensor, k: Tensor, key: Tensor, value: Tensor, limit: int, scale: float) -> Tensor:
    """The attention [B, T, HQ, D] of whole rows, each one sequence: of its first and of its second part, by their sums.

    A query sees the keys from the limit on as the query `limit` places before it sees all, in causal order.
    """
    q, far, k, key, value = (x.transpose(1, 2) for x in (q, far, k, key, value))
    near, near_sum = window_attention(q, k, value, limit, 0, scale)
    count = q.shape[1] - limit
    rest, rest_sum = window_attention(far[:, limit:], key[:, :count], value[:, :count], count, 0, scale)
    share = (rest_sum - near_sum[:, limit:]).sigmoid().unsqueeze(-1)
    mixed = near[:, limit:] + (share * (rest - near[:, limit:])).to(near.dtype)
    return torch.cat([near[:, :limit], mixed], dim=1)


AttentionInterface.register(IMPLEMENTATION, attend)
