"""The solve of DeltaFormer against its recursion, what it reduces to, and how its values grow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deltanet_kernels import deltaformer_solve
from deltanet_kernels.deltaformer import solve
from deltanet_kernels.deltaformer.reference import naive_deltaformer_solve
from support.refusals import assert_refused


def inputs(
    batch: int = 2, length: int = 13, past: int = 0, heads: int = 2, size: int = 6, values: int = 7, **kwargs: Any
) -> dict[str, torch.Tensor]:
    """Random arguments, float64 unless a dtype is given."""
    generator = torch.Generator().manual_seed(length + 100 * past)
    kwargs = {"dtype": torch.float64, "generator": generator, **kwargs}
    found = {
        "k": torch.randn(batch, length, heads, size, **kwargs),
        "v": torch.randn(batch, length, heads, values, **kwargs),
        "beta": torch.rand(batch, length, heads, **kwargs),
    }
    if past:
        found["past_k"] = torch.randn(batch, past, heads, size, **kwargs)
        found["past_u"] = torch.randn(batch, past, heads, values, **kwargs)
    return found


@pytest.mark.parametrize(
    ("block", "length", "past", "masked"),
    [
        (1, 1, 0, False), (1, 1, 4, True), (1, 13, 4, False), (1, 6, 11, True),
        (5, 1, 4, False), (5, 5, 0, True), (5, 13, 0, False), (5, 13, 4, True), (5, 6, 11, False),
        (128, 1, 0, True), (128, 13, 0, True), (128, 13, 4, False), (128, 6, 11, True),
    ],
)  # fmt: skip
def test_it_is_the_recursion_with_all_gradients(
    monkeypatch: pytest.MonkeyPatch, block: int, length: int, past: int, masked: bool
) -> None:
    monkeypatch.setattr(solve, "BLOCK", block)
    given = {name: x.requires_grad_() for name, x in inputs(length=length, past=past).items()}
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(2, length, past + length, generator=generator) < 0.6 if masked else None
    pull = torch.randn(2, length, 2, 7, dtype=torch.float64, generator=generator)
    wanted = naive_deltaformer_solve(**given, scale=0.7, mask=mask)
    found = deltaformer_solve(**given, scale=0.7, mask=mask)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(u, list(given.values()), pull, allow_unused=True) for u in (found, wanted)]
    for name, got, want in zip(given, *gradients, strict=True):
        want = torch.zeros_like(got) if want is None else want  # one token alone has no use for its key
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11, msg=name)


def test_it_is_the_triangular_solve() -> None:
    """(I + beta P) U = V with P the softmax of keys with the keys before them."""
    given = inputs()
    scores = torch.einsum("bthd,bshd->bhts", given["k"], given["k"]) * 6**-0.5
    weights = scores.masked_fill(~torch.ones(13, 13, dtype=torch.bool).tril(-1), -torch.inf).softmax(-1).nan_to_num()
    matrix = torch.eye(13, dtype=torch.float64) + given["beta"].transpose(1, 2).unsqueeze(-1) * weights
    wanted = torch.linalg.solve(matrix, given["v"].transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(deltaformer_solve(**given), wanted, rtol=1e-12, atol=1e-12)


def test_huge_and_equal_keys_stay_finite() -> None:
    given = inputs(length=9, dtype=torch.float32)
    given["k"] = given["k"] * 1e4
    given["k"][:, 3:6] = given["k"][:, 3:4]
    given = {name: x.requires_grad_() for name, x in given.items()}
    u = deltaformer_solve(**given)
    u.sum().backward()
    assert all(bool(torch.isfinite(x).all()) for x in (u, *(x.grad for x in given.values())))


def test_bfloat16_is_computed_in_float32() -> None:
    given = {name: x.bfloat16() for name, x in inputs(length=70).items()}
    wanted = naive_deltaformer_solve(**{name: x.double() for name, x in given.items()})
    found = deltaformer_solve(**given)
    assert found.dtype == torch.bfloat16
    assert (found.double() - wanted).norm() / wanted.norm() < 3e-3  # one rounding of the result


def test_what_does_not_fit_is_refused() -> None:
    rows: list[tuple[dict[str, torch.Tensor], type[Exception], str]] = [
        ({"v": torch.randn(2, 12, 2, 7)}, ValueError, "v: got shape"),
        ({"beta": torch.randn(2, 13)}, ValueError, "beta: got shape"),
        ({"past_k": torch.randn(2, 3, 2, 6)}, ValueError, "past_k, past_u: got one of the two"),
        ({"mask": torch.ones(2, 13, 12, dtype=torch.bool)}, ValueError, "mask: got shape"),
        ({"mask": torch.zeros(2, 13, 13)}, TypeError, "mask: got dtype"),
    ]
    assert_refused(deltaformer_solve, [(inputs() | changes, *refusal) for changes, *refusal in rows])
