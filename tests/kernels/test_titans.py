"""Titans' memory: the chunk form against the recurrence, its reductions, hazards and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deltanet_kernels import TitansState, chunk_titans, naive_gated_delta_rule, naive_titans
from tests.kernels.state_cases import SHAPES, Shape, assert_same, draw, inputs, results, single


def arguments(shape: Shape, state: bool = True) -> dict[str, Any]:
    normal = draw(1)
    found = inputs(shape)
    gates = (shape.B, shape.T, shape.HV)
    found |= {"log_mu": normal(*gates).sigmoid().log(), "theta": 0.5 * normal(*gates).sigmoid()}
    size = (shape.N, shape.HV, shape.K, shape.V)
    return found | ({"initial_state": TitansState(normal(*size), normal(*size))} if state else {})


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_are_the_recurrence(shape: Shape) -> None:
    given = arguments(shape)
    assert_same(results(chunk_titans, given), results(naive_titans, given), 1e-11)


def test_padding_leaves_memory_and_momentum_alone() -> None:
    shape = Shape("", T=70, B=2)
    given = arguments(shape)
    real = torch.rand(2, 70, generator=torch.Generator().manual_seed(3)) > 0.4
    given["padding"] = ~real
    found = results(chunk_titans, given, real)
    assert_same(found, results(naive_titans, given, real), 1e-11)
    row = {name: x[1:, real[1]] for name, x in given.items() if isinstance(x, torch.Tensor) and name != "padding"}
    row |= {"initial_state": TitansState(*(x[1:] for x in given["initial_state"]))}
    o, final = naive_titans(**row, use_qk_l2norm_in_kernel=True, output_final_state=True)
    assert_same(([found[0][0][1:, real[1]], *(x[1:] for x in found[0][1:])], []), ([o, *final], []), 1e-12)


@pytest.mark.parametrize("none", [-torch.inf, -1e4])
def test_without_momentum_it_is_comba(none: float) -> None:
    """Comba as the gated delta rule: beta = theta / e^g and v e^g."""
    given = arguments(Shape("", T=130, H=2, HQ=2, HV=2), state=False)
    given["log_mu"] = torch.full_like(given["log_mu"], none)
    found, gradients = results(chunk_titans, given)
    assert all(torch.isfinite(x).all() for x in gradients)
    decay = given["g"].exp()
    values = given["v"] * decay.unsqueeze(-1)
    o, final = naive_gated_delta_rule(
        given["q"], given["k"], values, given["g"], given["theta"] / decay, None, None, True, True
    )
    assert final is not None
    assert_same((found[:2], []), ([o, final], []), 1e-12)


@pytest.mark.parametrize("gate", [0.0, -200.0, -torch.inf])
def test_float32_beside_hard_gates(gate: float) -> None:
    given = arguments(Shape("", T=130, K=16, V=16))
    for name in ("g", "log_mu"):
        given[name][:, ::3] = gate
    found, wanted = results(chunk_titans, single(given)), results(naive_titans, given)
    assert_same(([x.double() for x in found[0]], [x.double() for x in found[1]]), wanted, 2e-5)


def test_wrong_arguments_are_named() -> None:
    given = arguments(Shape("", T=3))
    for change, error, message in (
        ({"log_mu": given["log_mu"][:, :2]}, ValueError, "log_mu: got shape"),
        ({"padding": torch.zeros(1, 3)}, TypeError, "padding: got dtype"),
        ({"padding": torch.zeros(1, 2, dtype=torch.bool)}, ValueError, "padding: got shape"),
        (
            {"initial_state": TitansState(*(x[..., :2] for x in given["initial_state"]))},
            ValueError,
            "initial_state.mem",
        ),
        ({"initial_state": TitansState(*(x.float() for x in given["initial_state"]))}, TypeError, "initial_state.mem"),
    ):
        with pytest.raises(error, match=message):
            chunk_titans(**(given | change))
