"""Inputs and comparisons for the operators whose state is several tensors: Mesa, TTT and Titans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltanet_kernels import MesaState

Results = tuple[list[Tensor], list[Tensor]]


@dataclass(frozen=True)
class Shape:
    """Sizes of one call."""

    name: str
    T: int
    B: int = 1
    H: int = 1
    HQ: int = 1
    HV: int = 1
    K: int = 5
    V: int = 4
    cu_seqlens: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def N(self) -> int:
        return self.B if self.cu_seqlens is None else len(self.cu_seqlens) - 1


SHAPES = [
    Shape("one token", T=1, B=2, HV=2, HQ=2, H=2),
    Shape("ragged", T=150, B=2),
    Shape("a chunk", T=64),
    Shape("K>V", T=20, K=7, V=2),
    Shape("K=V=1", T=20, K=1, V=1),
    Shape("query heads share a state", T=70, H=2, HQ=4, HV=2),
    Shape("value heads share keys and queries", T=70, B=2, H=1, HQ=2, HV=4),
    Shape("packed", T=150, H=2, HQ=2, HV=2, cu_seqlens=(0, 0, 1, 2, 70, 70, 140)),
    Shape("packed, nothing but empty", T=5, cu_seqlens=(0, 0, 0)),
]


def draw(seed: int = 0) -> Callable[..., Tensor]:
    """A function that draws standard normal tensors of a shape, float64."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


def inputs(shape: Shape, seed: int = 0) -> dict[str, Any]:
    """q, k, v, a log decay and packed boundaries, float64."""
    normal = draw(seed)
    s = shape
    return {
        "q": normal(s.B, s.T, s.HQ, s.K),
        "k": normal(s.B, s.T, s.H, s.K),
        "v": normal(s.B, s.T, s.HV, s.V),
        "g": -0.1 * normal(s.B, s.T, s.HV).exp(),
        "cu_seqlens": None if s.cu_seqlens is None else torch.tensor(s.cu_seqlens, dtype=torch.int32),
        "use_qk_l2norm_in_kernel": True,
        "output_final_state": True,
    }


def mesa_arguments(shape: Shape, state: bool = True) -> dict[str, Any]:
    """Arguments of the Mesa layer, float64."""
    normal = draw(1)
    beta = normal(shape.B, shape.T, shape.HV).sigmoid()
    found = inputs(shape) | {"beta": beta, "ridge": 0.25 + normal(shape.HV, shape.K).sigmoid()}
    if state:
        root = normal(shape.N, shape.HV, shape.K, shape.K) / shape.K**0.5  # larger ones take many steps to solve
        found["initial_state"] = MesaState(normal(shape.N, shape.HV, shape.K, shape.V), root @ root.mT)
    return found


def results(rule: Callable[..., Any], arguments: dict[str, Any], real: Tensor | None = None) -> Results:
    """Outputs and final states, and the gradients of every floating-point argument, states included.

    Args:
        real: [B, T] bool, the tokens whose outputs count; None for all.
    """
    leaves: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if isinstance(value, tuple):
            return type(value)(*(leaf(x) for x in value))
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        leaves.append(value.detach().clone().requires_grad_())
        return leaves[-1]

    o, final = rule(**{name: leaf(value) for name, value in arguments.items()})
    o = o if real is None else o * real[:, :, None, None]
    found = [o, *final]
    normal = draw(9)
    loss = sum((x.double() * normal(*x.shape).to(x.device)).sum() for x in found if x.is_floating_point())
    assert isinstance(loss, Tensor)
    if not loss.requires_grad:  # nothing is computed
        loss = loss + 0 * leaves[0].sum()
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    pairs = zip(gradients, leaves, strict=True)
    return [x.detach() for x in found], [torch.zeros_like(x) if grad is None else grad for grad, x in pairs]


def assert_same(found: Results, wanted: Results, tolerance: float) -> None:
    """Relative to the largest entry of each tensor, or to 1."""
    for ours, theirs in zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True):
        assert ours.shape == theirs.shape
        size = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * size)


def single(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments in float32."""

    def convert(value: Any) -> Any:
        if isinstance(value, tuple):
            return type(value)(*(convert(x) for x in value))
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

    return {name: convert(value) for name, value in arguments.items()}
