"""Projections in the coordinates of the principal components of a layer's input."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

COMPONENTS = 48  # R, at most
TOKENS_PER_COMPONENT = 40  # with fewer tokens per component, the gates overfit the calibration text


def principal_components(x: Tensor) -> Tensor:
    """Leading principal components [R, hidden] of x [n, T, hidden] about the origin.

    They are scaled so that each coordinate of x has a mean square of 1.
    """
    flat = x.flatten(0, 1)
    rank = max(1, min(COMPONENTS, len(flat) // TOKENS_PER_COMPONENT, flat.shape[1]))
    _, size, v = torch.svd_lowrank(flat, q=rank, niter=4)
    return v.T / (size / math.sqrt(len(flat))).clamp_min(1e-6 * size[0]).unsqueeze(-1)


def fold_linear(target: nn.Linear, weight: Tensor, const: Any, basis: Tensor, ones: Tensor) -> None:
    """Writes a projection that was fitted in the coordinates of `basis` into a layer.

    Args:
        target: [out, hidden].
        weight, const: the fitted matrix [out, R] and constant [out].
        basis: principal components [R, hidden].
        ones: direction [R] that gives about 1 for every input; it carries the constant where `target` has no bias.
    """
    weight = _with_constant(target, weight, const, ones)
    target.weight.copy_(weight @ basis)


def fold_low_rank(down: nn.Linear, up: nn.Linear, weight: Tensor, const: Any, basis: Tensor, ones: Tensor) -> None:
    """As `fold_linear`, into the product of `up` and `down`: the best one of its rank on the calibration text."""
    weight = _with_constant(up, weight, const, ones)
    if len(down.weight) < len(basis):
        u, size, v = torch.linalg.svd(weight, full_matrices=False)
        rank = len(down.weight)
        weight, basis = u[:, :rank] * size[:rank], v[:rank] @ basis
    nn.init.normal_(down.weight, std=float(basis.std()) or 1.0)  # rows beyond the fitted ones begin with no effect
    down.weight[: len(basis)] = basis
    up.weight.zero_()
    up.weight[:, : len(basis)] = weight


def _with_constant(target: nn.Linear, weight: Tensor, const: Any, ones: Tensor) -> Tensor:
    """Writes the constant into the bias; without a bias, returns the matrix [out, R] that has it along `ones`."""
    if target.bias is None:
        return weight + torch.outer(const, ones)
    target.bias.copy_(const)
    return weight
