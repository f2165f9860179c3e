"""The Mesa layer: chunks against the direct solver, the implicit gradient, recursive least squares, hazards, recall."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deltanet_kernels import chunk_mesa, naive_mesa, recurrent_mesa
from deltanet_kernels.mesa.solve import MesaSystem, conjugate_gradients
from tests.kernels.state_cases import SHAPES, Shape, assert_same, draw, mesa_arguments, results, single


def chunks(**given: Any) -> Any:
    return chunk_mesa(**given, steps=24)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_are_the_recurrence(shape: Shape) -> None:
    given = mesa_arguments(shape)
    assert_same(results(chunks, given), results(naive_mesa, given), 1e-10)


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


def test_float32_with_hard_gates_zero_queries_and_the_default_steps() -> None:
    given = mesa_arguments(Shape("", T=130, K=32, V=16), state=False)
    given["g"][:, ::7] = -200.0
    given["q"][:, 5] = 0.0
    given["q"][:, 6] *= 1e-9
    given["beta"][:, 20:30] = 0.0
    given["use_qk_l2norm_in_kernel"] = False
    given["k"] = F.normalize(given["k"], dim=-1)
    found, wanted = results(chunk_mesa, single(given)), results(naive_mesa, given)
    assert not found[0][0][:, 5].any()
    small = torch.linalg.vector_norm(found[0][0][:, 6].double() - wanted[0][0][:, 6])
    assert small < 1e-4 * torch.linalg.vector_norm(wanted[0][0][:, 6])  # no absolute floor stalls it
    assert_same(([x.double() for x in found[0]], [x.double() for x in found[1]]), wanted, 1e-4)


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
