"""Measures which channels of a head's keys are given 5 bits and which 3, where a cache has 4 (`PackedKeyValues`).

Rounding adds the error of a channel times the query's number there to a score. So a channel weighs as much as the mean
square of the queries times that of the keys' range in a group. A quarter of a head's channels, those that weigh most,
get 5 bits and a quarter 3. Both channels of a rotary pair get the mean of their weights: which of them is large depends
on the position, and the order is for all positions.

Shapes: n sequences, T tokens, HQ and HK query and key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from deltanet_hf.mixers.attention.family_attention import kind_of
from deltanet_hf.mixers.attention.routed_config import RoutedConfig
from deltanet_hf.mixers.cache.quantised_cache_spec import key_ranges
from deltanet_hf.mixers.layer.layer_kind import branches_of
from deltanet_hf.model_types import HALF_ANGLES
from deltanet_hf.models.cache_bits import KEY_ORDER
from deltanet_kernels.packed_cache.layout import key_bits

IMPLEMENTATION = "deltanet_key_order"  # the name under which the families' attention finds `_record`


@torch.no_grad()
def measured_key_order(attention: Any, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """The key order [HK, 2, D] of the teacher's attention.

    Args:
        attention: the attention, float32.
        x: its inputs [n, T, hidden].
        kwargs: its other arguments, for a batch of one.
    """
    found: list[Tensor] = []
    config = attention.config
    attention.config = RoutedConfig(config, IMPLEMENTATION)
    try:
        for row in x.split(1):
            attention(hidden_states=row, weights=found, **kwargs)
    finally:
        attention.config = config
    weights = torch.stack(found).mean(0)
    angles = kwargs.get("position_embeddings")
    if angles is not None:
        pairs = angles[0].shape[-1] // (1 if config.model_type in HALF_ANGLES else 2)
        halves = weights[:, : 2 * pairs].unflatten(1, (2, pairs))
        halves.copy_(halves.mean(1, keepdim=True).expand_as(halves))
    return order_by(weights)


def order_by(weights: Tensor) -> Tensor:
    """The key order [HK, 2, D] of channels with these weights [HK, D]."""
    places = key_bits(weights.shape[1], weights.device).argsort(descending=True, stable=True)
    channels = torch.empty_like(weights, dtype=torch.int64)
    channels[:, places] = weights.argsort(descending=True, stable=True)
    return torch.stack([channels, channels.argsort()], dim=1)


def set_key_order(attention: Any, order: Tensor) -> None:
    """Give the parts of a layer's attention the order [HK, 2, D] of their heads."""
    heads = kind_of(attention).branch_heads
    for name, branch in branches_of(attention).items():
        own = order[heads[name]]
        for part, count in kind_of(branch).softmax_parts:
            part.register_buffer(KEY_ORDER, own.repeat_interleave(count // len(own), dim=0))


def _record(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, weights: list[Tensor], **kwargs: Any
) -> tuple[Tensor, None]:
    """The attention function that a family's attention calls: adds the weights [HK, D] of one sequence to a list.

    What it returns has the shape of an output.
    """
    q, k = query[0].unflatten(0, (key.shape[1], -1)), key[0]
    weights.append(q.square().mean((1, 2)) * key_ranges(k).square().mean(0))
    return torch.zeros_like(query).transpose(1, 2), None


AttentionInterface.register(IMPLEMENTATION, _record)
