"""Argument checks of the attention of one query. Messages name the argument, what it is and what it needs."""

import torch

from deltanet_kernels.checks import (
    refuse_gradients,
    require_device,
    require_input,
    require_shape,
    require_tensor,
    shape_text,
)
from deltanet_kernels.flash_decoding.calls import DecodeAttentionCall


def check_decode_attention(call: DecodeAttentionCall) -> None:
    """Check the arguments of an attention of one query per sequence.

    Raises:
        ValueError: a shape, head count or device that does not fit, or gradients are required.
        TypeError: a dtype that does not fit, or an argument that is not a tensor.
    """
    q, k, v, mask, _ = call
    for name, x, meaning in (("q", q, "[B, HQ, 1, D]"), ("k", k, "[B, HK, S, D]"), ("v", v, "[B, HK, S, D]")):
        require_input(name, x, "q", q)
        if x.dim() != 4 or 0 in x.shape:
            raise ValueError(f"{name}: got shape {shape_text(x)}, needs {meaning} without empty dimensions")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: got dtype {x.dtype}, needs {q.dtype} (the dtype of q)")
    (B, HQ, T, D), (HK, S) = q.shape, k.shape[1:3]
    if T != 1:
        raise ValueError(f"q: got shape {shape_text(q)} with {T} tokens, needs one token")
    require_shape("k", k, (B, HK, S, D), "[B, HK, S, D] with B and D of q")
    require_shape("v", v, (B, HK, S, D), "the shape of k")
    if HQ % HK:
        raise ValueError(f"q: got {HQ} heads, needs a multiple of the {HK} heads of k")
    require_device("mask", require_tensor("mask", mask), "q", q.device)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask: got dtype {mask.dtype}, needs torch.bool (True: seen)")
    require_shape("mask", mask, (B, 1, 1, S), "[B, 1, 1, S]")
    refuse_gradients("decode_attention", "torch.nn.functional.scaled_dot_product_attention", q, k, v)
