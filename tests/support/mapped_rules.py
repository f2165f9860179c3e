"""Inputs and comparisons for the rules that the gated delta rule computes after a change of its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from support.tiny_models import tiny_student

B, T, H, K, V = 2, 75, 2, 8, 6  # T: more than one chunk, and a ragged one


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, g, beta and an initial state, all float64."""
    q, k, v = draw(B, T, H, K), 3 * draw(B, T, H, K, seed=1), draw(B, T, H, V, seed=2)
    g, beta = -draw(B, T, H, seed=3).exp() / 4, draw(B, T, H, seed=4).sigmoid()
    return q, k, v, g, beta, draw(B, H, K, V, seed=5)


def close(found: Any, wanted: Any, tolerance: float = 1e-12) -> None:
    """Relative to the largest element."""
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).abs().max()) <= tolerance * float(other.abs().max())


def gradients(function: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Of a fixed random projection of all results."""
    tensors = tuple(x.detach().clone().requires_grad_() for x in tensors)
    results = function(*tensors)
    loss = sum((x * draw(*x.shape, seed=9)).sum() for x in results)
    return torch.autograd.grad(loss, tensors)


def layer_of(name: str, **changes: Any) -> Any:
    """A layer without anything around its recurrence, float64."""
    bare = {"conv_size": 0, "output_norm": "none", "output_gate": False, "rope": False, "qk_activation": "none"}
    model = tiny_student("llama", mixer=name, k_offset=False, **bare, **changes).double()
    return model.model.layers[0].self_attn
