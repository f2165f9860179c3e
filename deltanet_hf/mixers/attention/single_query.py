"""Softmax attention of one token to keys and values in a fixed number of places, some of them empty.

The operator `decode_attention` computes it; on a GPU its programs share the places of a sequence, which PyTorch's SDPA
with a mask leaves to one program. Under torch.compile it is SDPA, as the model's own attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig

from deltanet_kernels import decode_attention
from deltanet_kernels.flash_decoding.calls import DecodeAttentionCall
from deltanet_kernels.flash_decoding.reference import torch_decode_attention

SINGLE_QUERY = "deltanet_single_query"  # the name under which the families' attention finds `attend`
TAKES_MASK = ("eager", "sdpa", SINGLE_QUERY)
"""The attention implementations that take a mask [B, 1, T, S]."""


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, HQ, 1, D], key and value [B, HK, S, D], mask [B, 1, 1, S] bool -> [B, 1, HQ, D], without dropout."""
    call = DecodeAttentionCall(query, key, value, attention_mask, scaling)
    o = torch_decode_attention(call) if torch.compiler.is_compiling() else decode_attention(*call)
    return o.transpose(1, 2), None


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
