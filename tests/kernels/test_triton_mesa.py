"""The Triton form of the Mesa layer against the direct solver in float64.

Without a GPU its kernels run in Triton's interpreter: float32 and float16, small heads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deltanet_kernels import MesaState, chunk_mesa, naive_mesa
from tests.kernels.state_cases import SHAPES, Results, Shape, assert_same, draw, mesa_arguments, results, single
from tests.kernels.triton_mode import DEVICE, GPU

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
    from deltanet_kernels.mesa.calls import MesaCall, check_mesa
    from deltanet_kernels.mesa.chunk import chunk_mesa_triton

    call = MesaCall(q, k, v, g, beta, ridge, initial_state=initial_state, steps=steps, **options)
    check_mesa(call)
    return chunk_mesa_triton(call)


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


@pytest.mark.parametrize("output", ["o", "final"])
def test_gradient_of_one_output(output: str) -> None:
    def gradients(rule: Any, given: dict[str, Any]) -> list[Tensor]:
        leaves = {name: given[name].requires_grad_() for name in GRADIENTS}
        o, final = rule(**(given | leaves))
        read = o if output == "o" else final.values.square() + final.keys.sum()
        found = torch.autograd.grad(read.square().sum(), list(leaves.values()), allow_unused=True)
        return [torch.zeros_like(x) if y is None else y for x, y in zip(leaves.values(), found, strict=True)]

    given = mesa_arguments(Shape("", T=20, H=2, HQ=2, HV=2, K=4, V=4))
    pairs = [gradients(triton_mesa, on_device(given)), gradients(naive_mesa, given)]
    assert_same(in_double((pairs[0], [])), (pairs[1], []), 2e-5)


def test_strides_of_every_kind() -> None:
    """q, k, v as slices of one tensor, expanded gates, a gradient with zero strides."""
    joined = draw(4)(1, 40, 48)
    ridge = torch.ones(2, 8, dtype=torch.float64)

    def found(rule: Any, device: str, dtype: torch.dtype) -> list[Tensor]:
        x = joined.to(device, dtype).requires_grad_()
        beta = torch.full((1, 1, 2), 0.5, device=device, dtype=dtype, requires_grad=True)
        q, k, v = (part.unflatten(-1, (2, 8)) for part in x.split(16, dim=-1))
        o, _ = rule(q, k, v, -beta.expand(1, 40, 2) / 4, beta.expand(1, 40, 2), ridge.to(device, dtype))
        return [o.detach(), *torch.autograd.grad(o.sum(), (x, beta))]

    ours = found(triton_mesa, DEVICE, torch.float32)
    wanted = found(naive_mesa, "cpu", torch.float64)
    assert_same(in_double((ours, [])), (wanted, []), 2e-5)


def test_refused_calls_name_the_reason() -> None:
    x = torch.randn(1, 2, 1, 160, device=DEVICE)
    beta = torch.rand(1, 2, 1, device=DEVICE)
    for q, v, message in ((x, x, "head sizes 160 and 160"), (x[..., :100], x, "head sizes 100 and 160")):
        with pytest.raises(NotImplementedError, match=message):
            triton_mesa(q, q, v, -beta, beta, q.new_ones(1, q.shape[3]))
    q = x[..., :16].double()
    with pytest.raises(NotImplementedError, match="float64"):
        triton_mesa(q, q, q, -beta, beta, torch.ones(1, 16, device=DEVICE))


def test_registered_operator_is_sound() -> None:
    """Schema, fake implementation and gradient registration agree with what the operator does."""
    import deltanet_kernels.mesa.chunk  # noqa: F401 (registers it)

    given = on_device(mesa_arguments(Shape("", T=9, HQ=2), state=False))
    for keep in (True, False):
        torch.library.opcheck(
            torch.ops.deltanet.mesa_forward.default,
            (*(given[name] for name in GRADIENTS), None, None, 1.0, 8, True, keep),
            test_utils=("test_schema", "test_faketensor"),
        )


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
@pytest.mark.parametrize("size", [64, 128])
def test_hundred_runs_are_identical(size: int) -> None:
    given = on_device(mesa_arguments(Shape("", T=300, B=2, H=2, HQ=2, HV=2, K=size, V=size)))
    first = results(chunk_mesa, given)
    for _ in range(100):
        again = results(chunk_mesa, given)
        for ours, theirs in zip((*first[0], *first[1]), (*again[0], *again[1]), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.gpu
def test_float64_falls_back_with_the_reason() -> None:
    given = {name: x.cuda() for name, x in mesa_arguments(SHAPES[2], state=False).items() if isinstance(x, Tensor)}
    with pytest.warns(RuntimeWarning, match="float64"):
        o, _ = chunk_mesa(**given)
    assert o.dtype == torch.float64
