"""Attention sinks as learned numbers (gpt-oss): the softmax of a head has one more score, which belongs to no token.

With Z the sum of exponentials of the scores and b that number, an attention w becomes w Z / (Z + exp(b)).
"""

from __future__ import annotations

import torch
from torch import Tensor


def with_learned_sinks(output: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp with sinks, from those without.

    Args:
        output: [..., HQ, D]; lse: log Z [..., HQ] float32; sinks: b [HQ], or None for none.
    """
    if sinks is None:
        return output, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    return output * (lse - total).exp().unsqueeze(-1).to(output.dtype), total
