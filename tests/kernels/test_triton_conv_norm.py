"""The convolution and norm kernels against their PyTorch forms in float64, forward and every gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deltanet_kernels import causal_conv1d, gated_rms_norm
from tests.kernels.cases import relative_error
from tests.kernels.triton_mode import DEVICE, GPU, by_pytorch, triton_conv, triton_norm

DTYPES = [torch.float32, *([torch.bfloat16, torch.float16] if GPU else [])]


def tolerance(dtype: torch.dtype) -> float:
    return 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps


def compare(kernel: Callable[..., Any], plain: Callable[..., Any], leaves: list[torch.Tensor]) -> None:
    """Outputs and gradients of both functions of a list of tensors; the plain one in float64."""
    answers = []
    for function, dtype in ((kernel, leaves[0].dtype), (plain, torch.float64)):
        own = [x.to(dtype).requires_grad_() for x in leaves]
        outputs = [y for y in function(own) if y.numel()]
        torch.manual_seed(1)
        upstream = [torch.randn(y.shape, device=y.device).to(leaves[0].dtype).to(dtype) for y in outputs]
        answers.append([*outputs, *torch.autograd.grad(outputs, own, upstream)])
    for found, wanted in zip(*answers, strict=True):
        assert relative_error(found, wanted) < tolerance(leaves[0].dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("T", "D", "W", "activation", "bias", "state", "bounds"),
    [
        (70, 20, 4, "silu", False, True, None),
        (5, 70, 4, None, True, False, None),
        (2, 8, 4, "silu", True, True, None),
        (3, 10, 1, "silu", False, False, None),
        (80, 10, 4, "silu", True, True, (0, 1, 1, 68, 75)),
        (80, 10, 3, None, False, False, (0, 1, 1, 68, 75)),
    ],
)
def test_convolution(
    T: int, D: int, W: int, activation: str | None, bias: bool, state: bool, bounds: tuple[int, ...] | None,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    B = 2 if bounds is None else 1
    N = B if bounds is None else len(bounds) - 1
    shapes = [(B, T, D), (D, W), *([(D,)] if bias else []), *([(N, D, W - 1)] if state else [])]
    leaves = [torch.randn(*shape, device=DEVICE).to(dtype) for shape in shapes]
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device=DEVICE)

    def call(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: function(
            x[0], x[1], x[2] if bias else None, activation, x[-1] if state else None, True, cu_seqlens
        )

    compare(call(triton_conv), call(by_pytorch(causal_conv1d)), leaves)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "weight", "gate"),
    [
        ((2, 35, 3, 20), (20,), True),
        ((2, 35, 3, 20), (3, 20), True),
        ((70, 16), (16,), False),
        ((1, 300), (300,), True),
    ],
)
def test_norm(shape: tuple[int, ...], weight: tuple[int, ...], gate: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(*s, device=DEVICE).to(dtype) for s in ((shape, shape, weight) if gate else (shape, weight))]

    def call(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: [function(x[0], x[1] if gate else None, x[-1], 1e-6)]

    compare(call(triton_norm), call(by_pytorch(gated_rms_norm)), leaves)


@pytest.mark.parametrize("weight", [(20,), (3, 20)])
@pytest.mark.parametrize(("start", "heads"), [(0, 3), (1, 3), (7, 0)])
def test_gates_that_are_slices(weight: tuple[int, ...], start: int, heads: int) -> None:
    """Of the product with several weights: tokens, or with `heads` 0 also heads, apart from one another."""
    torch.manual_seed(0)
    joint = torch.randn(2, 35, 100, device=DEVICE).bfloat16()
    z = joint[..., start : start + 60].unflatten(-1, (3, 20)) if heads else joint[..., start : start + 75 : 25, None]
    z = z if heads else z.expand(2, 35, 3, 20)
    x, w = torch.randn(2, 35, 3, 20, device=DEVICE).bfloat16(), torch.randn(weight, device=DEVICE)
    assert not z.is_contiguous()
    assert torch.equal(triton_norm(x, z, w), triton_norm(x, z.contiguous(), w))
    one = (x[:, :1], z[:, :1], w)  # one token per row
    assert torch.equal(triton_norm(*one), triton_norm(x, z.contiguous(), w)[:, :1])


@pytest.mark.gpu
def test_compile_without_a_graph_break() -> None:
    x = torch.randn(2, 30, 64, device=DEVICE, requires_grad=True)
    weight = torch.randn(64, 4, device=DEVICE, requires_grad=True)

    def both(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y, _ = triton_conv(x, weight, activation="silu")
        return triton_norm(y, x, weight[:, 0])

    eager = torch.autograd.grad(both(x, weight).sum(), (x, weight))
    compiled = torch.autograd.grad(torch.compile(both, fullgraph=True)(x, weight).sum(), (x, weight))
    for found, wanted in zip(compiled, eager, strict=True):
        assert relative_error(found, wanted) < 1e-6
