"""Softmax attention of one token to keys and values in a fixed number of places, some of them empty.

With one query per sequence, the query heads that share a key head are queries of it that see the same tokens. PyTorch's
SDPA then reads keys and values once; given a mask, it would want them repeated for every query head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedConfig

SINGLE_QUERY = "deltanet_single_query"  # the name under which the families' attention finds `attend`
TAKES_MASK = ("eager", "sdpa", SINGLE_QUERY)
"""The attention implementations that take a mask [B, 1, T, S]."""


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, HQ, 1, D], key and value [B, HK, S, D], mask [B, 1, 1, S] bool -> [B, 1, HQ, D], without dropout."""
    batch, heads, _, _ = query.shape
    grouped = query.reshape(batch, key.shape[1], -1, query.shape[-1])
    output = F.scaled_dot_product_attention(grouped, key, value, attention_mask, scale=scaling)
    return output.reshape(batch, 1, heads, value.shape[-1]), None


AttentionInterface.register(SINGLE_QUERY, attend)


@contextmanager
def reading_places(config: PreTrainedConfig) -> Iterator[None]:
    """Softmax layers that use SDPA attend by `attend`; every call is one token with a mask."""
    before = config._attn_implementation
    config._attn_implementation = SINGLE_QUERY
    try:
        yield
    finally:
        config._attn_implementation = before
