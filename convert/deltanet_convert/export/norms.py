"""Zero-centred norms: the target computes x_hat * (1 + w'), so w' = w - 1 must not lose bits.

In bfloat16 it does wherever w < 1/2. There, the norm's weight is multiplied by a (signed) power of two that brings it
into [1/2, 1), and the columns of the matrices that read the norm's output are divided by it: both exact, the product
unchanged. The q/k norms have no such reader (a rotation follows) and are stored in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltanet_hf.errors import UserError


def centre(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """w -> w - 1 in `dtype`."""
    return (weight.double() - 1.0).to(dtype)


def uncentre(stored: Tensor, factors: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight that `centre` (after multiplication by `factors`) was given."""
    weight = stored.double() + 1.0
    return (weight if factors is None else weight / factors.double()).to(dtype)


def loses_bits(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[C] bool: the channels whose w - 1 is not exact in `dtype`."""
    return centre(weight, dtype).double() + 1.0 != weight.double()


def fold_factors(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """[C] float32 powers of two (1 where nothing is lost, negative for negative weights); None when all are 1."""
    lost = loses_bits(weight, dtype)
    if not bool(lost.any()):
        return None
    mantissa, exponent = torch.frexp(weight.double())
    return torch.where(lost, mantissa.sign() * torch.exp2(-exponent.double()), 1.0).float()


def divide_columns(matrix: Tensor, factors: Tensor | None, name: str) -> Tensor:
    """matrix [R, C] with its columns divided by `factors` [C]; UserError where that underflows."""
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
    """Channels, exponents and signs (-1 or 1) of the factors that are not 1."""
    channels = (factors != 1).nonzero().flatten()
    chosen = factors[channels]
    return {
        "channels": channels.tolist(),
        "exponents": chosen.abs().log2().int().tolist(),
        "signs": chosen.sign().int().tolist(),
    }


def factors_from_json(value: dict[str, Any], width: int) -> Tensor:
    """The factors that `factors_to_json` was given."""
    factors = torch.ones(width)
    signs = torch.tensor(value["signs"], dtype=torch.float32)
    factors[torch.tensor(value["channels"])] = signs * torch.exp2(torch.tensor(value["exponents"]).float())
    return factors
