"""Attention of one query per sequence by PyTorch's SDPA."""

import torch
from torch.nn import functional as F

from deltanet_kernels.flash_decoding.calls import DecodeAttentionCall


def torch_decode_attention(call: DecodeAttentionCall) -> torch.Tensor:
    """`deltanet_kernels.decode_attention` by SDPA.

    The query heads that share a key head become queries of it that see the same tokens, so keys and values are read
    once: given a mask, SDPA would want them repeated for every query head.
    """
    q, k, v, mask, scale = call
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    return F.scaled_dot_product_attention(grouped, k, v, mask, scale=scale).reshape(q.shape)
