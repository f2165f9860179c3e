"""The layer norm of the inner model, and the gradient of the inner loss through it.

With h = LN(z) = weight * x + bias, x = (z - mean z) / sqrt(var z + eps), and the loss |h - wanted|^2 / 2, the gradient
of z is (e - mean e - x mean(e x)) / sqrt(var z + eps) for e = weight * (h - wanted).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from deltanet_kernels.ttt.calls import InnerNorm

EPS = 1e-6


def with_one(x: Tensor) -> Tensor:
    """[..., K] -> [..., K + 1]: the channel that reads the inner model's bias."""
    return F.pad(x, (0, 1), value=1.0)


def normalise(z: Tensor, norm: InnerNorm) -> Tensor:
    """LN(z) for z [B, HV, C, V]."""
    x, _ = _standardised(z)
    return torch.addcmul(norm.bias.unsqueeze(1), norm.weight.unsqueeze(1), x)


def loss_gradient(z: Tensor, wanted: Tensor, norm: InnerNorm) -> Tensor:
    """The gradient of |LN(z) - wanted|^2 / 2 with respect to z; all [B, HV, C, V]."""
    x, inverse = _standardised(z)
    weight = norm.weight.unsqueeze(1)
    error = weight * (torch.addcmul(norm.bias.unsqueeze(1), weight, x) - wanted)
    return (error - error.mean(-1, keepdim=True) - x * (error * x).mean(-1, keepdim=True)) * inverse


def _standardised(z: Tensor) -> tuple[Tensor, Tensor]:
    centred = z - z.mean(-1, keepdim=True)
    inverse = (centred.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return centred * inverse, inverse
