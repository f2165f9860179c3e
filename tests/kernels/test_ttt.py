"""Test-time training: chunks against the recurrence, mini-batches that begin anywhere, reductions and stability."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deltanet_kernels import InnerNorm, TTTState, chunk_ttt, naive_ttt
from tests.kernels.state_cases import SHAPES, Shape, assert_same, draw, inputs, results, single

SQUARE = [
    Shape("one token", T=1, B=2, HV=2, HQ=2, H=2, V=5),
    Shape("ragged", T=70, B=2, V=5),
    Shape("keys shared", T=40, B=2, HV=2, HQ=2, V=5),
    Shape("query heads share a state", T=40, HV=2, HQ=4, V=5),
    Shape("packed", T=60, H=2, HQ=2, HV=2, V=5, cu_seqlens=(0, 0, 1, 2, 30, 30, 55)),
]


def arguments(shape: Shape, mini_batch: int, norm: bool = False, count: int | None = None) -> dict[str, Any]:
    """With `count`, the state lies behind so many tokens of a mini-batch (one less in the second row)."""
    normal = draw(1)
    eta = normal(shape.B, shape.T, shape.HV).sigmoid() / mini_batch
    found = inputs(shape) | {"eta": eta, "mini_batch": mini_batch}
    if norm:
        first = normal(shape.HV, shape.K + 1, shape.V)
        found["norm"] = InnerNorm(1 + 0.3 * normal(shape.HV, shape.V), normal(shape.HV, shape.V), first)
    if count is not None:
        size = (shape.N, shape.HV, shape.K + norm, shape.V)
        counts = (count - torch.arange(shape.N)).clamp_min(0).int()
        pending = normal(*size) * (counts > 0)[:, None, None, None]
        found["initial_state"] = TTTState(normal(*size), pending, counts)
    return found


BATCHES = [(shape, (3, 16)[number % 2]) for number, shape in enumerate(SHAPES)]
BATCHES += [(SHAPES[1], 3), (SHAPES[1], 100), (SHAPES[7], 1), (SHAPES[7], 3)]


@pytest.mark.parametrize(("shape", "mini_batch"), BATCHES, ids=str)
def test_chunks_are_the_recurrence(shape: Shape, mini_batch: int) -> None:
    count = min(2, mini_batch - 1) if shape.cu_seqlens is None else None
    given = arguments(shape, mini_batch, count=count)
    assert_same(results(chunk_ttt, given), results(naive_ttt, given), 1e-11)


@pytest.mark.parametrize(("shape", "mini_batch"), [*((shape, 8) for shape in SQUARE), (SQUARE[1], 1)], ids=str)
def test_mini_batches_with_layer_norm_are_the_recurrence(shape: Shape, mini_batch: int) -> None:
    count = min(5, mini_batch - 1) if shape.cu_seqlens is None else None
    given = arguments(shape, mini_batch, norm=True, count=count)
    assert_same(results(chunk_ttt, given), results(naive_ttt, given), 1e-11)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_padding_does_not_count(norm: bool, packed: bool) -> None:
    """Gaps anywhere give what the remaining tokens give; the rows end at different places of a mini-batch."""
    shape = Shape("", T=70, B=1 if packed else 3, V=5, cu_seqlens=(0, 20, 20, 61) if packed else None)
    given = arguments(shape, 8, norm, count=None if packed else 5)
    real = torch.rand(shape.B, 70, generator=torch.Generator().manual_seed(3)) > 0.4
    if packed:
        real[0, 61:] = True  # behind the last sequence there is neither padding nor a token
    else:
        real[2] = False
    given["padding"] = ~real
    found = results(chunk_ttt, given, real)
    assert_same(found, results(naive_ttt, given, real), 1e-11)
    spans = [(0, 0, 20), (0, 20, 61)] if packed else [(0, 0, 70), (1, 0, 70)]
    for row, begin, end in spans:
        kept = real[row, begin:end]
        alone = given | {name: given[name][row : row + 1, begin:end][:, kept] for name in ("q", "k", "v", "g", "eta")}
        if packed:
            alone["cu_seqlens"] = None
        else:
            alone["initial_state"] = TTTState(*(x[row : row + 1] for x in given["initial_state"]))
        o, _ = naive_ttt(**(alone | {"padding": None}))
        torch.testing.assert_close(found[0][0][row, begin:end][kept], o[0], rtol=0, atol=1e-11)


def test_a_mini_batch_takes_its_gradients_at_its_first_weights() -> None:
    """The definition, with autograd of the inner loss: linear and with layer norm and residual."""
    given = arguments(Shape("", T=12, V=5), 4, norm=True)
    given["g"] = torch.zeros_like(given["g"])
    given["use_qk_l2norm_in_kernel"] = False
    q, k, v, eta = (given[name][0, :, 0] for name in ("q", "k", "v", "eta"))
    for norm in (None, given["norm"]):
        o, _ = chunk_ttt(**(given | {"norm": norm, "scale": 1.0}))

        def f(x: torch.Tensor, weight: torch.Tensor, norm: InnerNorm | None = norm) -> torch.Tensor:
            if norm is None:
                return x @ weight[:5]
            z = torch.cat([x, torch.ones(1, dtype=x.dtype)]) @ weight
            return x + F.layer_norm(z, (5,), norm.weight[0], norm.bias[0], 1e-6)

        weight = base = torch.zeros(6, 5, dtype=torch.float64) if norm is None else norm.first[0]
        for t in range(12):
            if t % 4 == 0:
                base = weight
            leaf = base.clone().requires_grad_()
            (slope,) = torch.autograd.grad((f(k[t], leaf) - v[t]).square().sum() / 2, leaf)
            weight = weight - eta[t] * slope
            torch.testing.assert_close(o[0, t, 0], f(q[t], weight), rtol=0, atol=1e-12)


def test_float32_beside_hard_gates() -> None:
    given = arguments(Shape("", T=130, K=16, V=16), 16, count=3)
    given["g"][:, ::5] = -torch.inf
    found, wanted = results(chunk_ttt, single(given)), results(naive_ttt, given)
    assert_same(
        ([x.double() for x in found[0]], [x.double() for x in found[1]]),
        ([x.double() for x in wanted[0]], wanted[1]),
        2e-5,
    )


def test_wrong_arguments_are_named() -> None:
    given = arguments(Shape("", T=3), 4, count=2)
    state = given["initial_state"]
    ones = torch.ones(1, 6, 5, dtype=torch.float64)
    norm = InnerNorm(ones[:, 0], ones[:, 0], ones)
    offsets = torch.tensor([0, 3])
    for change, error, message in (
        ({"mini_batch": 0}, ValueError, "mini_batch: got 0"),
        ({"norm": norm}, ValueError, "norm: got keys of 5 and values of 4"),
        ({"v": given["k"], "norm": norm._replace(bias=norm.bias[:, :2])}, ValueError, "norm.bias: got shape"),
        ({"v": given["k"], "norm": norm._replace(first=ones[:, 1:])}, ValueError, "norm.first: got shape"),
        ({"cu_seqlens": offsets}, ValueError, "initial_state: packed sequences begin without one"),
        ({"initial_state": state._replace(tokens=torch.zeros(1))}, ValueError, "initial_state.tokens: got"),
        ({"initial_state": state._replace(pending=state.pending[..., :2])}, ValueError, "initial_state.pending: got"),
    ):
        with pytest.raises(error, match=message):
            chunk_ttt(**(given | change))
