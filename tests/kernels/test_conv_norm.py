"""The short convolution and the gated norm, in PyTorch and by Triton, against their definitions in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deltanet_kernels import causal_conv1d, gated_rms_norm
from tests.kernels.cases import relative_error
from tests.kernels.triton_mode import DEVICE, GPU, by_pytorch, by_triton, triton_conv, triton_norm

DTYPES = [torch.float32, *([torch.bfloat16, torch.float16] if GPU else [])]
every_form = pytest.mark.parametrize("form", [by_pytorch, by_triton])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def compare(form: Callable[..., Any], definition: Callable[..., Any], leaves: list[Tensor]) -> None:
    """Outputs and gradients of both functions of tensors; the definition in float64, whose gradient is autograd's."""
    answers, dtype = [], leaves[0].dtype
    for function, own_dtype in ((form, dtype), (definition, torch.float64)):
        own = [x.to(own_dtype).requires_grad_() for x in leaves]
        outputs = [y for y in function(*own) if y.numel()]
        torch.manual_seed(1)
        upstream = [torch.randn(y.shape, device=y.device).to(dtype).to(own_dtype) for y in outputs]
        answers.append([*outputs, *torch.autograd.grad(outputs, own, upstream, materialize_grads=True)])
    for found, wanted in zip(*answers, strict=True):
        assert found.dtype == dtype
        assert relative_error(found, wanted) < (1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps)


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, silu: bool, bounds: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """[B, T, D] and the last W - 1 inputs of each sequence, by torch's own convolution of each behind its past."""
    D, W = weight.shape
    sequences = list(x) if bounds is None else [x[0, start:end] for start, end in itertools.pairwise(bounds)]
    outputs, last = [], []
    for n, tokens in enumerate(sequences):
        row = torch.cat([x.new_zeros(D, W - 1) if state is None else state[n], tokens.T], dim=1)
        outputs.append(F.conv1d(row, weight.unsqueeze(1), bias, groups=D).T if len(tokens) else tokens)
        last.append(row[:, len(tokens) :])
    y = torch.stack(outputs) if bounds is None else F.pad(torch.cat(outputs), (0, 0, 0, x.shape[1] - bounds[-1]))[None]
    return F.silu(y) if silu else y, torch.stack(last)


@every_form
@every_dtype
@pytest.mark.parametrize(
    ("T", "D", "W", "silu", "bias", "state", "bounds"),
    [
        *((T, 6, W, True, True, True, None) for T, W in ((1, 1), (1, 4), (2, 4), (3, 4), (4, 2))),
        *((T, 6, W, False, False, False, None) for T, W in ((1, 4), (9, 4), (9, 1))),
        (70, 20, 4, True, False, True, None),
        (5, 70, 4, False, True, False, None),
        (80, 10, 4, True, True, True, (0, 1, 1, 68, 75)),
        (80, 10, 3, False, False, False, (0, 1, 1, 68, 75)),
        (13, 5, 4, True, True, True, (0, 0, 1, 3, 3, 10, 10)),
    ],
)
def test_convolution(
    form: Any, dtype: torch.dtype, T: int, D: int, W: int, silu: bool, bias: bool, state: bool,
    bounds: tuple[int, ...] | None,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    B, N = (2, 2) if bounds is None else (1, len(bounds) - 1)
    shapes = [(B, T, D), (D, W), *([(D,)] if bias else []), *([(N, D, W - 1)] if state else [])]
    leaves = [torch.randn(*shape, device=DEVICE).to(dtype) for shape in shapes]
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device=DEVICE)

    def given(x: Tensor, weight: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return x, weight, rest[0] if bias else None, rest[-1] if state else None

    def found(*tensors: Tensor) -> Any:
        *own, past = given(*tensors)
        return form(causal_conv1d)(*own, "silu" if silu else None, past, True, cu_seqlens)

    compare(found, lambda *tensors: convolution(*given(*tensors), silu, bounds), leaves)


@every_form
def test_tokens_after_the_last_sequence_reach_nothing(form: Any) -> None:
    x, weight = torch.randn(1, 13, 5, device=DEVICE), torch.randn(5, 4, device=DEVICE)
    x[:, 10:] = torch.nan
    y, state = form(causal_conv1d)(x, weight, None, "silu", None, True, torch.tensor([0, 3, 10], device=DEVICE))
    assert (y[:, 10:] == 0).all()
    assert y.isfinite().all()
    assert state.isfinite().all()


def test_convolution_can_be_the_identity_and_keeps_the_dtype() -> None:
    x = torch.randn(2, 7, 4).bfloat16()
    weight = torch.zeros(4, 4)
    weight[:, -1] = 1
    y, final = causal_conv1d(x, weight, output_final_state=True)
    assert torch.equal(y, x)
    assert final.dtype == torch.bfloat16


@every_form
@every_dtype
@pytest.mark.parametrize(
    ("shape", "weight", "gate"),
    [
        ((2, 35, 3, 20), (20,), True),
        ((2, 35, 3, 20), (3, 20), True),
        ((2, 5, 3, 100), (3, 100), False),
        ((70, 16), (16,), False),
        ((1, 300), (300,), True),
        ((2, 5, 3, 1), (3, 1), True),
    ],
)
def test_norm(form: Any, dtype: torch.dtype, shape: tuple[int, ...], weight: tuple[int, ...], gate: bool) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(*s, device=DEVICE).to(dtype) for s in (shape, weight, *([shape] if gate else []))]

    def found(x: Tensor, w: Tensor, z: Tensor | None = None) -> list[Tensor]:
        return [form(gated_rms_norm)(x, z, w, 0.1)]

    def definition(x: Tensor, w: Tensor, z: Tensor | None = None) -> list[Tensor]:
        y = x * (x.square().mean(-1, keepdim=True) + 0.1).rsqrt() * w
        return [y if z is None else y * F.silu(z)]

    compare(found, definition, leaves)


def test_norm_in_pytorch_rounds_once() -> None:
    torch.manual_seed(0)
    x, z, weight = torch.randn(4, 64).bfloat16(), torch.randn(4, 64).bfloat16(), torch.randn(64)
    y = gated_rms_norm(x, z, weight, 1e-6)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, gated_rms_norm(x.float(), z.float(), weight, 1e-6).bfloat16())


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
