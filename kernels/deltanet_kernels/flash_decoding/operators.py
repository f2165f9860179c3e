"""The public operator of attention to a cache."""

from __future__ import annotations

import torch

from deltanet_kernels import dispatch
from deltanet_kernels.flash_decoding.checks import check_decode_attention
from deltanet_kernels.flash_decoding.reference import torch_decode_attention


def decode_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Softmax attention of one query per sequence to keys and values in S places, some of them empty. No gradients.

    HK divides HQ, and query head j reads key head j // (HQ/HK). The order of the places does not matter. On CUDA
    programs share the places of a sequence, also where there are few sequences and heads; the results have the same
    bits every time. Keys and values are read once, in place, if their last dimension is contiguous.

    Args:
        q: queries [B, HQ, 1, D].
        k, v: keys and values [B, HK, S, D], dtype of q; finite also where the mask is False.
        mask: [B, 1, 1, S] bool, True where the query sees the place, for all heads.
        scale: factor of the scores, D**-0.5 by default.

    Returns:
        o [B, HQ, 1, D] in the dtype of q; 0 in sequences whose query sees nothing.

    Raises:
        ValueError: shapes, head counts or devices that do not fit, or gradients are required.
        TypeError: dtypes that do not fit.
    """
    check_decode_attention(q, k, v, mask)
    return dispatch.call("decode_attention", torch_decode_attention, q, q, k, v, mask, scale)  # type: ignore[no-any-return]
