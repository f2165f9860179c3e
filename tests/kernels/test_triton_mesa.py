"""The Triton form of the Mesa layer against the direct solver in float64.

Without a GPU its kernels run in Triton's interpreter: float32 and float16, small heads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deltanet_kernels import MesaState, naive_mesa
from tests.kernels.state_cases import SHAPES, Results, Shape, assert_same, draw, inputs, results, single
from tests.kernels.triton_mode import DEVICE, GPU

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA device")
pytestmark = pytest.mark.usefixtures("poisoned_memory")
GRADIENTS = ("q", "k", "v", "g", "beta", "ridge")


def triton_mesa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ridge: Tensor,
    initial_state: MesaState | None = None,
    steps: int = 16,
    **options: Any,
) -> Any:
    """`chunk_mesa` by the Triton kernels on any device."""
    from deltanet_kernels.arguments import RuleCall
    from deltanet_kernels.mesa.chunk import chunk_mesa_triton
    from deltanet_kernels.mesa.state import check_mesa

    call = RuleCall(q, k, v, g, beta, **options)
    return chunk_mesa_triton(call, ridge, check_mesa(call, ridge, initial_state), steps)


def arguments(shape: Shape, state: bool = True) -> dict[str, Any]:
    """Float64, on the CPU."""
    normal = draw(1)
    beta = normal(shape.B, shape.T, shape.HV).sigmoid()
    found = inputs(shape) | {"beta": beta, "ridge": 0.25 + normal(shape.HV, shape.K).sigmoid()}
    if state:
        root = normal(shape.N, shape.HV, shape.K, shape.K)
        found["initial_state"] = MesaState(normal(shape.N, shape.HV, shape.K, shape.V), root @ root.mT)
    return found


def on_device(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments in float32 where the kernels run."""

    def move(value: Any) -> Any:
        if isinstance(value, tuple):
            return type(value)(*(move(x) for x in value))
        return value.to(DEVICE) if isinstance(value, Tensor) else value

    return {name: move(value) for name, value in single(given).items()}


def in_double(found: Results) -> Results:
    return [x.double().cpu() for x in found[0]], [x.double().cpu() for x in found[1]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(shape: Shape) -> None:
    given = arguments(shape)
    found = results(triton_mesa, on_device(given) | {"steps": 24})
    assert_same(in_double(found), results(naive_mesa, given), 2e-5)
