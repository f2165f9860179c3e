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
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from deltanet_kernels import decode_attention
from deltanet_kernels.flash_decoding.calls import DecodeAttentionCall
from deltanet_kernels.flash_decoding.reference import torch_decode_attention

SINGLE_QUERY = "deltanet_single_query"  # the name under which the families' attention finds `attend`
UNMASKED = "deltanet_unmasked"  # that of SDPA in calls that need no mask but causal order
TAKES_MASK = ("eager", "sdpa", SINGLE_QUERY, UNMASKED)
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
# transformers makes no masks for names that it has no mask function of; its own SDPA may get one while a graph is
# captured, and then leaves the flash kernel.
AttentionInterface.register(UNMASKED, sdpa_attention_forward)


@contextmanager
def attending_by(config: PreTrainedConfig, name: str) -> Iterator[None]:
    """Softmax layers that use SDPA attend by `attend`, where every call is one token with a mask (`SINGLE_QUERY`), or
    by SDPA without a mask, where every call is a causal one on an empty cache (`UNMASKED`)."""
    before = config._attn_implementation
    if before == "sdpa":
        config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before
