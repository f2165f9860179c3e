"""The call of attention to a cache: its arguments, documented, as one typed object; and its check."""

from typing import NamedTuple

import torch

from deltanet_kernels.checks import check_tensors, refuse_gradients, require_multiple


class DecodeAttentionCall(NamedTuple):
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

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor
    scale: float | None = None

    @property
    def factor(self) -> float:
        """The factor of the scores: `scale`, or D**-0.5 by default."""
        return float(self.q.shape[3] ** -0.5) if self.scale is None else float(self.scale)


def check_decode_attention(call: DecodeAttentionCall) -> None:
    """Check the arguments of an attention of one query per sequence.

    Raises:
        ValueError: a shape, head count or device that does not fit, or gradients are required.
        TypeError: a dtype that does not fit, or an argument that is not a tensor.
    """
    dims = {"q": "B HQ 1 D", "k": "B HK S D", "v": "B HK S D", "mask": "B 1 1 S"}
    sizes = check_tensors(call, dims, same=("k", "v"), dtypes={"mask": (torch.bool,)})
    require_multiple("q", sizes["HQ"], "k", sizes["HK"])
    refuse_gradients("decode_attention", "torch.nn.functional.scaled_dot_product_attention", *call[:3])
