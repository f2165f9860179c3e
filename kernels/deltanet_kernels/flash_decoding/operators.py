"""The operator of attention to a cache."""

# mypy: allow-untyped-defs
from __future__ import annotations

from deltanet_kernels.dispatch import Operator
from deltanet_kernels.flash_decoding.calls import DecodeAttentionCall, check_decode_attention
from deltanet_kernels.flash_decoding.reference import torch_decode_attention


def _attention():
    from deltanet_kernels.flash_decoding.attention import decode_attention_triton

    return decode_attention_triton


decode_attention = Operator(
    "decode_attention",
    DecodeAttentionCall,
    check=check_decode_attention,
    cpu=torch_decode_attention,
    triton=_attention,
)
