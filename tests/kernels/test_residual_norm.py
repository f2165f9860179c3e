"""The norm of a residual sum has the roundings of its PyTorch form, in every layout of rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deltanet_kernels import rms_norm
from support.refusals import assert_refused
from tests.kernels.triton_mode import DEVICE, by_pytorch, triton_rms_norm

pytestmark = pytest.mark.usefixtures("rounding_to_nearest")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = {"llama": (0.0, True), "olmo": (0.0, False), "gemma": (1.0, False)}
SHAPES = [(1,), (5, 7), (3, 1, 33), (2, 2, 2, 20), (2, 1, 576), (1, 1, 1030)]


def cut(x: torch.Tensor) -> torch.Tensor:
    """Rows that lie within wider ones, as slices of several projections in one tensor."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 3), torch.nan, dtype=x.dtype, device=x.device)
    wide[..., 1 : 1 + x.shape[-1]] = x
    return wide[..., 1 : 1 + x.shape[-1]]


def turned(x: torch.Tensor) -> torch.Tensor:
    """Dimensions in the reverse order in memory."""
    return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))


def sparse(x: torch.Tensor) -> torch.Tensor:
    """Every second element of memory."""
    return x.repeat_interleave(2, dim=-1)[..., ::2]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": torch.Tensor.contiguous,
    "cut": cut,
    "turned": turned,
    "sparse": sparse,
    "heads of a cut": lambda x: cut(x.flatten(-2)).unflatten(-1, x.shape[-2:]) if x.dim() > 3 else cut(x),
}


def make(shape: tuple[int, ...], dtype: torch.dtype, whole: bool = False) -> list[torch.Tensor]:
    """x, weight and residual; of `whole` numbers, whose squares have the same sum in any order."""
    generator = torch.Generator().manual_seed(0)
    shapes = (shape, shape[-1:], shape)
    if whole:
        made = [torch.randint(-200, 201, size, generator=generator).float() for size in shapes]
    else:
        made = [torch.randn(size, generator=generator) for size in shapes]
    return [x.to(DEVICE, dtype) for x in made]


def both(
    x: torch.Tensor, weight: torch.Tensor, form: str, residual: torch.Tensor | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Result (and sum) of the kernel and of the PyTorch form."""
    answers = []
    for function in (triton_rms_norm, by_pytorch(rms_norm)):
        total = None if residual is None else torch.full(x.shape, torch.nan, dtype=x.dtype, device=x.device)
        before = x.clone()
        y = function(x, weight, 1e-5, *FORMS[form], residual, total)
        assert torch.equal(x, before) or x.isnan().any()
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        answers.append([y] if total is None else [total, y])
    return answers[0], answers[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_equal_where_the_order_of_a_sum_does_not_matter(form: str, dtype: torch.dtype, poisoned_memory: None) -> None:
    """Alone, and with a residual."""
    for shape in ((3, 1, 64), (2, 2, 3, 32), (4, 1)):
        x, weight, residual = make(shape, dtype, whole=True)
        for added in (None, residual):
            found, wanted = both(x, weight, form, added)
            for one, other in zip(found, wanted, strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_within_a_rounding_in_every_layout(layout: str) -> None:
    for dtype, (number, shape) in itertools.product(DTYPES, enumerate(SHAPES)):
        form = list(FORMS)[number % 3]
        x, weight, residual = make(shape, dtype)
        for addend in (None, residual):
            apart = [LAYOUTS[layout](one) if one.dim() > 1 else one for one in (x, residual)]
            found, wanted = both(apart[0], weight, form, None if addend is None else apart[1])
            assert torch.equal(found[0], wanted[0]) or addend is None
            # In float32 the order of the sum, the root and the products differ by an ulp or less each. Elsewhere n may
            # be rounded to its other neighbour, and its product with the weight once more.
            ulps = 4 if dtype == torch.float32 else 2
            error = (found[-1].double() - wanted[-1].double()).abs()
            assert (error <= ulps * torch.finfo(dtype).eps * wanted[-1].double().abs()).all()
            if dtype != torch.float32:
                assert (error > 0).double().mean() < 0.02


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_another_dtype(form: str) -> None:
    x, weight, _ = make((4, 1, 32), torch.bfloat16, whole=True)
    if form == "llama":
        with pytest.raises(TypeError, match=r"weight: got dtype torch.float32, needs that of x \(torch.bfloat16\)"):
            rms_norm(x, weight.float(), round_first=True)
    else:
        found, wanted = both(x, weight.float() + 0.3, form)
        assert torch.equal(found[0], wanted[0])


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_huge_and_undefined_values(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    rows = [0.0, largest, -largest, torch.inf, torch.nan, torch.finfo(dtype).tiny]
    x = torch.tensor(rows, dtype=dtype, device=DEVICE)[:, None, None].expand(-1, 1, 16).contiguous()
    weight = torch.ones(16, dtype=dtype, device=DEVICE)
    for form in FORMS:
        for residual in (None, x, -x):
            found, wanted = both(x, weight, form, residual)
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=torch.finfo(dtype).eps, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 1, 16), (2, 0, 16), (0, 16)])
def test_empty_batches(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, device=DEVICE)
    found, wanted = both(x, torch.ones(16, device=DEVICE), "llama", x)
    assert found[1].shape == wanted[1].shape == shape


def test_the_sum_may_take_the_place_of_an_addend() -> None:
    x, weight, residual = make((3, 1, 64), torch.bfloat16)
    wanted = triton_rms_norm(x, weight, 1e-5, 0.0, True, residual, total := torch.empty_like(x))
    assert torch.equal(triton_rms_norm(x, weight, 1e-5, 0.0, True, residual, residual), wanted)
    assert torch.equal(residual, total)


def test_under_the_compiler() -> None:
    x, weight, residual = make((3, 1, 64), torch.float32)

    def call(total: torch.Tensor) -> torch.Tensor:
        y = triton_rms_norm(x, weight, 1e-5, 1.0, False, residual, total)
        return y + total.sum(-1, keepdim=True)

    with torch.no_grad():
        totals = [torch.empty_like(x) for _ in range(2)]
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(totals[0])
        torch.testing.assert_close(compiled, call(totals[1]))
        torch.testing.assert_close(*totals)


X = torch.randn(2, 3, 4)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"weight": torch.randn(3, 4)}, ValueError, r"weight: got shape \[3, 4\], needs \[D\] = \[4\]"),
    ({"round_first": True, "offset": 1.0}, ValueError, "offset: got 1.0, needs 0 with round_first"),
    ({"residual": X}, ValueError, "residual, total: got one of them"),
    ({"total": X}, ValueError, "residual, total: got one of them"),
    ({"residual": X, "total": X[:1]}, ValueError, r"total: got shape \[1, 3, 4\], needs the shape of x"),
    ({"residual": X.half(), "total": X}, TypeError, "residual: got dtype torch.float16"),
    ({"residual": X, "total": X.mT.contiguous().mT}, ValueError, "total: got a tensor that is not contiguous"),
    ({"weight": torch.randn(4, requires_grad=True)}, ValueError, "rms_norm has no gradients"),
]


def test_what_is_wrong_is_named() -> None:
    good = {"x": X, "weight": torch.randn(4)}
    assert_refused(rms_norm, [(good | changes, *refusal) for changes, *refusal in WRONG])


def test_what_the_kernel_does_not_take() -> None:
    x = torch.ones(1, 16, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="float64"):
        triton_rms_norm(x, x[0], 1e-5, 0.0, False, None, None)
    assert rms_norm(x, x[0]).dtype == torch.float64
