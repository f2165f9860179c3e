"""Linear layers with one input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ALIGNMENT = 8  # numbers of outputs that matrix products are fast for are multiples of it


def linear_products(x: Tensor, linears: Sequence[nn.Module | None]) -> list[Tensor | None]:
    """The outputs [..., out] of linear layers for x [..., in], in order; None for a missing one.

    With gradients, layers of few outputs, one per head, are one product: apart, the three of a layer take 4% of a
    training step of SmolLM2-135M.
    """
    narrow = [one for one in linears if type(one) is nn.Linear and one.out_features % ALIGNMENT and _is_bare(one)]
    if len(narrow) < 2 or not torch.is_grad_enabled():
        return [None if one is None else one(x) for one in linears]
    sizes = [one.out_features for one in narrow]
    rest = -sum(sizes) % ALIGNMENT
    biases: list[Tensor] = [one.weight.new_zeros(one.out_features) if one.bias is None else one.bias for one in narrow]
    weight = F.pad(torch.cat([one.weight for one in narrow]), (0, 0, 0, rest))
    product = F.linear(x, weight, F.pad(torch.cat(biases), (0, rest))).split([*sizes, rest], -1)
    found = dict(zip(narrow, product, strict=False))
    return [None if one is None else found[one] if one in found else one(x) for one in linears]


def _is_bare(linear: nn.Linear) -> bool:
    """Whether nothing has been put around the call of a layer: hooks, or another forward (offloading)."""
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    return "forward" not in linear.__dict__ and not any(hooks)
