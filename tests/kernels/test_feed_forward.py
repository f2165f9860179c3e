"""silu(gate) * up in one kernel: the roundings of the separate operations, in every layout of rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deltanet_kernels import silu_product
from deltanet_kernels.feed_forward import silu_product_op
from tests.kernels.triton_mode import DEVICE, GPU, triton_product

SHAPES = [(1, 1, 1), (2, 3, 40), (1, 5, 1536), (3, 1, 1025)]


def make(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    gate, up = (4 * torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in range(2))
    return gate, up


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product(shape: tuple[int, ...]) -> None:
    gate, up = make(shape)
    wanted = F.silu(gate.double()) * up.double()
    for compute in (silu_product, triton_product):
        torch.testing.assert_close(compute(gate, up).double(), wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_are_rounded_as_before(dtype: torch.dtype) -> None:
    gate, up = make((2, 7, 1030), dtype)
    found, wanted = triton_product(gate, up), F.silu(gate) * up
    # A float32 that lies between two numbers may round to either; Triton's interpreter cuts bfloat16 off, twice.
    steps = 2 if GPU or dtype == torch.float16 else 4
    torch.testing.assert_close(found, wanted, rtol=steps * torch.finfo(dtype).eps, atol=0)
    if GPU:
        assert (found == wanted).float().mean() > 0.999


def test_slices_of_one_tensor_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    joint = make((2, 4, 81))[0]
    gate, up = joint[..., :40], joint[..., 41:]
    wanted = F.silu(gate) * up
    monkeypatch.setattr(Tensor, "contiguous", lambda self: pytest.fail("copied"))
    torch.testing.assert_close(triton_product(gate, up), wanted, rtol=2e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_ends_of_the_range() -> None:
    gate = torch.tensor([-math.inf, -1e4, -90.0, 0.0, 1e4, math.inf, math.nan], device=DEVICE).view(1, 1, -1)
    found = triton_product(gate, torch.ones_like(gate)).flatten().tolist()
    assert math.isnan(found[0])  # as -inf * 0 in PyTorch's SiLU
    assert found[1] == 0
    assert abs(found[2]) < 1e-30
    assert found[3:6] == [0.0, 1e4, math.inf]
    assert math.isnan(found[6])


def test_the_operator_is_registered_consistently() -> None:
    torch.library.opcheck(silu_product_op.op, make((2, 3, 4)))


def test_bad_arguments() -> None:
    gate, up = (x.cpu() for x in make((2, 3, 4)))
    with pytest.raises(ValueError, match=r"up: got shape \[2, 3, 2\]"):
        silu_product(gate, up[..., :2])
    with pytest.raises(ValueError, match="gate: got shape"):
        silu_product(gate[0], up[0])
    with pytest.raises(TypeError, match="up: got dtype"):
        silu_product(gate, up.half())
    with pytest.raises(ValueError, match="silu_product has no gradients"):
        silu_product(gate.requires_grad_(), up)
