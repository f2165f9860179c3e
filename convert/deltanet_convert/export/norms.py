"""Zero-centred norms: Qwen3.5 computes x_hat * (1 + w'), so an export stores w' = w - 1.

In bfloat16, w - 1 loses bits wherever w < 1/2. There, the norm's weight is multiplied by a (signed) power of two that
brings it into [1/2, 1), and the columns of the matrices that read the norm's output are divided by the same power. Both
operations are exact and the product is unchanged. The q/k norms are followed by a rotation instead of a matrix and are
stored in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltanet_hf.errors import UserError


def centre(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns w - 1 in `dtype`."""
    return (weight.double() - 1.0).to(dtype)


def uncentre(stored: Tensor, factors: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Undoes `centre` and the multiplication by `factors` before it."""
    weight = stored.double() + 1.0
    return (weight if factors is None else weight / factors.double()).to(dtype)


def loses_bits(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Marks the channels [C] whose w - 1 is not exact in `dtype`."""
    return centre(weight, dtype).double() + 1.0 != weight.double()


def fold_factors(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Powers of two [C] float32 by which the weights are multiplied; None if all of them are 1.

    A factor is 1 where w - 1 is exact, and negative where the weight is negative.
    """
    lost = loses_bits(weight, dtype)
    if not bool(lost.any()):
        return None
    mantissa, exponent = torch.frexp(weight.double())
    return torch.where(lost, mantissa.sign() * torch.exp2(-exponent.double()), 1.0).float()


def divide_columns(matrix: Tensor, factors: Tensor | None, name: str) -> Tensor:
    """Divides the columns of a matrix [R, C] by `factors` [C]; UserError if a value underflows."""
    if factors is None:
        return matrix
    divided = (matrix.float() / factors).to(matrix.dtype)
    if not torch.equal((divided.float() * factors).to(matrix.dtype), matrix):
        raise UserError(f"{name}: a power of two moved here from a norm underflows; choose --dtype bfloat16 or float32")
    return divided


def multiply_columns(matrix: Tensor, factors: Tensor | None) -> Tensor:
    """Undoes `divide_columns`."""
    return matrix if factors is None else (matrix.float() * factors).to(matrix.dtype)


def factors_to_json(factors: Tensor) -> dict[str, list[int]]:
    """Lists channels, exponents and signs (-1 or 1) of the factors that are not 1."""
    channels = (factors != 1).nonzero().flatten()
    chosen = factors[channels]
    return {
        "channels": channels.tolist(),
        "exponents": chosen.abs().log2().int().tolist(),
        "signs": chosen.sign().int().tolist(),
    }


def factors_from_json(value: dict[str, Any], width: int) -> Tensor:
    """Undoes `factors_to_json`; width: the number of channels C."""
    factors = torch.ones(width)
    signs = torch.tensor(value["signs"], dtype=torch.float32)
    factors[torch.tensor(value["channels"])] = signs * torch.exp2(torch.tensor(value["exponents"]).float())
    return factors
