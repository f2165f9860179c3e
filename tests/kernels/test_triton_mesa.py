"""The Triton form of the Mesa layer against the direct solver in float64.

Without a GPU its kernels run in Triton's interpreter: float32 and float16, small heads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deltanet_kernels import chunk_mesa, naive_mesa
from tests.kernels.state_cases import SHAPES, Results, Shape, assert_same, draw, mesa_arguments, results, single
from tests.kernels.triton_mode import DEVICE, GPU, by_triton

pytestmark = pytest.mark.usefixtures("poisoned_memory")
GRADIENTS = ("q", "k", "v", "g", "beta", "ridge")


triton_mesa = by_triton(chunk_mesa)


def on_device(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments in float32 where the kernels run."""

    def move(value: Any) -> Any:
        if isinstance(value, tuple):
            return type(value)(*(move(x) for x in value))
        return value.to(DEVICE) if isinstance(value, Tensor) else value

    return {name: move(value) for name, value in single(given).items()}


def in_double(found: Results) -> Results:
    return [x.double().cpu() for x in found[0]], [x.double().cpu() for x in found[1]]


CASES = [
    Shape("one token", T=1, B=2),
    Shape("ragged", T=70, B=2),
    Shape("whole tiles", T=64, K=16, V=16),
    Shape("several tiles of values", T=20, K=20, V=33),
    Shape("K=V=1", T=20, K=1, V=1),
    Shape("query heads share a state", T=40, H=2, HQ=4, HV=2),
    Shape("value heads share keys and queries", T=40, H=1, HQ=2, HV=4),
    Shape("packed", T=80, H=2, HQ=2, HV=2, cu_seqlens=(0, 0, 1, 2, 40, 40, 75)),
    Shape("packed, nothing but empty", T=5, cu_seqlens=(0, 0, 0)),
]


@pytest.mark.parametrize("shape", [*CASES, *(SHAPES if GPU else [])], ids=str)
def test_every_shape(shape: Shape) -> None:
    given = mesa_arguments(shape)
    found = results(triton_mesa, on_device(given) | {"steps": 40})
    assert_same(in_double(found), results(naive_mesa, given), 2e-5)


def test_hazards() -> None:
    """Gates that shut, -inf included, zero queries and keys, no writes, tiny queries, huge values."""
    given = mesa_arguments(Shape("", T=70, K=16, V=8), state=False) | {"use_qk_l2norm_in_kernel": False}
    given["k"] = F.normalize(given["k"], dim=-1)
    given["g"][:, ::7] = -200.0
    given["g"][:, 40] = -torch.inf
    given["g"][:, 50:55] = 0.0
    given["q"][:, 5] = 0.0
    given["q"][:, 6] *= 1e-9
    given["k"][:, 10:13] = 0.0
    given["beta"][:, 20:33] = 0.0
    given["v"][:, 45] *= 1e6
    given["ridge"] = torch.logspace(-0.6, 1, 16, dtype=torch.float64)[None]
    found, wanted = in_double(results(triton_mesa, on_device(given) | {"steps": 40})), results(naive_mesa, given)
    assert all(x.isfinite().all() for x in (*found[0], *found[1]))
    assert not found[0][0][:, 5].any()
    small = (found[0][0][:, 6] - wanted[0][0][:, 6]).norm()
    assert small < 1e-4 * wanted[0][0][:, 6].norm()  # no absolute floor stalls it
    shut = given["g"].isinf()
    found[1][3][shut] = wanted[1][3][shut] = 0.0  # e^g is 0 there, and so is its derivative, or NaN
    assert_same(found, wanted, 2e-5)


def test_nothing_but_zeros() -> None:
    given = {
        name: torch.zeros_like(x) for name, x in mesa_arguments(CASES[1], state=False).items() if name in GRADIENTS
    }
    given |= {"ridge": torch.ones_like(given["ridge"]), "output_final_state": True}
    outputs, gradients = results(triton_mesa, on_device(given) | {"use_qk_l2norm_in_kernel": True})
    assert not any(x.any() for x in outputs)
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("steps", [1, 3])
def test_as_many_steps_as_the_pytorch_form(steps: int) -> None:
    """Far from solved, so that one step more or less would show, also in the second solve."""
    given = mesa_arguments(Shape("", T=40, K=16, V=8)) | {"steps": steps}
    assert_same(in_double(results(triton_mesa, on_device(given))), results(chunk_mesa, given), 2e-5)


def test_16_bit_inputs() -> None:
    """Computed in float32; only the inputs, the outputs and their gradients are rounded."""
    dtype = torch.bfloat16 if GPU else torch.float16  # the interpreter has no bfloat16
    given = mesa_arguments(Shape("", T=40, HQ=2, HV=1, K=16, V=16))
    low = on_device(given) | {name: given[name].to(DEVICE, dtype) for name in ("q", "k", "v")}
    exact = given | {name: low[name].double().cpu() for name in ("q", "k", "v")}
    found = results(triton_mesa, low | {"steps": 24})
    assert {found[0][0].dtype, *(x.dtype for x in found[1][:3])} == {dtype}
    assert_same(in_double(found), results(naive_mesa, exact), torch.finfo(dtype).eps)


# On the GPU only: the dispatch, every size of tiles, ill-conditioned keys, bits.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("K", "V"), [(16, 40), (40, 16), (64, 64), (100, 128), (128, 64), (128, 128)])
def test_every_head_size(K: int, V: int, dtype: torch.dtype) -> None:
    given = mesa_arguments(Shape("", T=150, B=2, H=2, HQ=4, HV=2, K=K, V=V))
    low = on_device(given) | {name: given[name].to(DEVICE, dtype) for name in ("q", "k", "v")}
    exact = given | {name: low[name].double().cpu() for name in ("q", "k", "v")}
    found = results(chunk_mesa, low | {"steps": 40})
    tolerance = 2e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert_same(in_double(found), results(naive_mesa, exact), tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128])
def test_keys_that_share_most_of_their_power(size: int) -> None:
    """The condition is about a thousand: products of 10 bits would be wrong by 1%."""
    given = mesa_arguments(Shape("", T=512, H=2, HQ=2, HV=2, K=size, V=size), state=False)
    given["k"] = given["k"] + 3 * draw(5)(1, 1, 2, size)
    given |= {"q": given["k"] + 0.5 * given["q"], "g": 0 * given["g"], "ridge": torch.full_like(given["ridge"], 0.25)}
    found = in_double(results(chunk_mesa, on_device(given) | {"steps": 40}))
    wanted = results(naive_mesa, given)
    for ours, theirs in zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True):
        assert (ours - theirs).norm() < 3e-4 * theirs.norm()


@pytest.mark.gpu
def test_float64_falls_back_with_the_reason() -> None:
    given = {name: x.cuda() for name, x in mesa_arguments(SHAPES[2], state=False).items() if isinstance(x, Tensor)}
    with pytest.warns(RuntimeWarning, match="float64"):
        o, _ = chunk_mesa(**given)
    assert o.dtype == torch.float64
