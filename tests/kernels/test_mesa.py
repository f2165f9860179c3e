"""The Mesa layer in PyTorch and by Triton: against the direct solver, recursive least squares, hazards, recall.

Without a GPU the kernels run in Triton's interpreter: float32 and float16, small heads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deltanet_kernels import chunk_mesa, naive_mesa, recurrent_mesa
from deltanet_kernels.mesa.solve import MesaSystem, conjugate_gradients
from tests.kernels.state_cases import SHAPES, Results, Shape, assert_same, draw, mesa_arguments, results, single
from tests.kernels.triton_mode import DEVICE, GPU, by_pytorch, by_triton

pytestmark = pytest.mark.usefixtures("poisoned_memory")
GRADIENTS = ("q", "k", "v", "g", "beta", "ridge")
pytorch_mesa, triton_mesa = by_pytorch(chunk_mesa), by_triton(chunk_mesa)


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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pytorch(shape: Shape) -> None:
    given = mesa_arguments(shape)
    assert_same(results(pytorch_mesa, given | {"steps": 24}), results(naive_mesa, given), 1e-10)


@pytest.mark.parametrize("shape", [*CASES, *(SHAPES if GPU else [])], ids=str)
def test_triton(shape: Shape) -> None:
    given = mesa_arguments(shape)
    found = results(triton_mesa, on_device(given) | {"steps": 40})
    assert_same(in_double(found), results(naive_mesa, given), 2e-5)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[5], SHAPES[6]], ids=str)
def test_token_by_token(shape: Shape) -> None:
    given = mesa_arguments(shape) | {"cu_seqlens": None}
    wanted, final = naive_mesa(**given)
    for name in ("output_final_state", "cu_seqlens"):
        del given[name]
    outputs, state = [], given.pop("initial_state")
    tokens = ("q", "k", "v", "g", "beta")
    for begin, end in ((0, 3), (3, 4), (4, shape.T)):
        part = given | {name: given[name][:, begin:end] for name in tokens}
        o, state = recurrent_mesa(**part, initial_state=state, steps=24)
        outputs.append(o)
    assert_same(([torch.cat(outputs, 1), *state], []), ([wanted, *final], []), 1e-10)


@pytest.mark.parametrize(
    ("form", "options", "tolerance"), [(pytorch_mesa, {}, 1e-4), (triton_mesa, {"steps": 40}, 2e-5)]
)
def test_hazards(form: Any, options: dict[str, int], tolerance: float) -> None:
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
    found, wanted = in_double(results(form, on_device(given) | options)), results(naive_mesa, given)
    assert all(x.isfinite().all() for x in (*found[0], *found[1]))
    assert not found[0][0][:, 5].any()
    small = (found[0][0][:, 6] - wanted[0][0][:, 6]).norm()
    assert small < 1e-4 * wanted[0][0][:, 6].norm()  # no absolute floor stalls it
    shut = given["g"].isinf()
    found[1][3][shut] = wanted[1][3][shut] = 0.0  # e^g is 0 there, and so is its derivative, or NaN
    assert_same(found, wanted, tolerance)


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


@pytest.mark.parametrize(("common", "decay"), [(0.0, 0.9), (0.9, 1.0)])
def test_sixteen_steps_solve_the_smallest_ridge(common: float, decay: float) -> None:
    """Unit keys with a common component; 0.9 is a short memory, the worst case."""
    normal = draw(2)
    k = F.normalize(
        (1 - common) ** 0.5 * normal(300, 64) / 8 + common**0.5 * F.normalize(normal(1, 64), dim=-1), dim=-1
    )
    weight = decay ** torch.arange(299, -1, -1, dtype=torch.float64)
    H = (k * weight.unsqueeze(-1)).T @ k
    q = F.normalize(normal(20, 64), dim=-1)
    wanted = torch.linalg.solve(H + 0.25 * torch.eye(64, dtype=torch.float64), q.T).T
    ridge = torch.full((1, 1, 64), 0.25)
    found = conjugate_gradients(MesaSystem(H[None].float(), ridge), q[None].float(), 16)[0]
    assert (found - wanted).norm() < 1e-4 * wanted.norm()


def test_a_ridge_that_decays_is_recursive_least_squares() -> None:
    """With Lambda_t = e^{g_1 + ... + g_t} Lambda_0, P = (H + Lambda)^{-1} follows by rank-one updates."""
    given = mesa_arguments(Shape("", T=40, K=6), state=False) | {"scale": 1.0, "use_qk_l2norm_in_kernel": False}
    ridge = given["ridge"][0]
    q, k, v, decay, beta = (given[name][0, :, 0] for name in ("q", "k", "v", "g", "beta"))
    decay = decay.exp()
    P, W = torch.diag(1 / ridge), torch.zeros(6, 4, dtype=torch.float64)
    left = torch.ones((), dtype=torch.float64)
    for t in range(40):
        P, left = P / decay[t], left * decay[t]
        gain = beta[t] * P @ k[t] / (1 + beta[t] * k[t] @ P @ k[t])
        W = W + torch.outer(gain, v[t] - W.T @ k[t])
        P = P - torch.outer(gain, P @ k[t])
        # The same token of the Mesa layer, its ridge the decayed one of all earlier tokens.
        part = given | {name: given[name][:, : t + 1] for name in ("q", "k", "v", "g", "beta")}
        o, _ = chunk_mesa(**(part | {"ridge": (left * ridge)[None]}), steps=30)
        torch.testing.assert_close(o[0, t, 0], W.T @ q[t], rtol=0, atol=1e-9)


def test_wrong_arguments_are_named() -> None:
    given = mesa_arguments(Shape("", T=3))
    state = given["initial_state"]
    for change, error, message in (
        ({"ridge": given["ridge"][:, :2]}, ValueError, "ridge: got shape"),
        ({"initial_state": state._replace(keys=state.keys[..., :2])}, ValueError, "initial_state.keys: got shape"),
        ({"initial_state": state._replace(values=state.values.float())}, TypeError, "initial_state.values: got dtype"),
    ):
        with pytest.raises(error, match=message):
            chunk_mesa(**(given | change))


# On the GPU only: the dispatch, every size of tiles, ill-conditioned keys.


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
