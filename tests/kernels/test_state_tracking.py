"""State tracking with exact weights: parity and permutations, by write strengths of 2 (arXiv 2411.12537, 2502.10297).

With a key k = (e_a - e_b) / sqrt(2), a strength of 2 and no value, a write swaps rows a and b of the state.
"""

import math
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch

from deltanet_hf.mixers.deltaproduct import interleave
from deltanet_kernels import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

FORMS = (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule)
Form = Callable[..., Any]


def parity_inputs(bits: torch.Tensor, strength: float) -> tuple[torch.Tensor, ...]:
    """One key everywhere: a start token writes 1, a bit of 1 has the given strength and the value 0."""
    tokens = len(bits) + 1
    keys = torch.zeros(1, tokens, 1, 4, dtype=torch.float64)
    keys[..., 0] = 1
    values = torch.zeros_like(keys)
    values[:, 0] = 1
    beta = torch.cat([torch.ones(1), strength * bits]).double().view(1, tokens, 1)
    return keys, keys, values, torch.zeros_like(beta), beta


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("tokens", "tolerance"), [(64, 1e-13), (1024, 1e-12), (4096, 4e-12)])
def test_parity_is_exact_with_a_strength_of_two(form: Form, tokens: int, tolerance: float) -> None:
    bits = torch.randint(2, (tokens,), generator=torch.Generator().manual_seed(0))
    output, _ = form(*parity_inputs(bits, 2.0), scale=1.0)
    signs = (-1.0) ** bits.cumsum(0)
    assert (output[0, 1:, 0, 0] - signs).abs().max() < tolerance


def test_no_strength_up_to_one_flips_a_sign() -> None:
    bits = torch.ones(9)
    for strength in (0.0, 0.3, 1.0):
        output, _ = chunk_gated_delta_rule(*parity_inputs(bits, strength), scale=1.0)
        assert (output >= 0).all()


def transpositions(element: tuple[int, ...]) -> list[tuple[int, int]]:
    """Swaps of rows which, one after the other, move what is in row i to row element[i]."""
    found, left = [], list(element)
    for i in range(len(left)):
        while left[i] != i:
            j = left[i]
            found.append((i, j))
            left[i], left[j] = left[j], left[i]
    return found


def writes_of(elements: list[tuple[int, ...]], n_h: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Keys [1, T, n_h, n] and strengths [1, T, n_h] that permute the rows; None if an element takes more writes."""
    degree = len(elements[0])
    keys = torch.zeros(1, len(elements), n_h, degree, dtype=torch.float64)
    keys[..., 0] = 1
    strengths = torch.zeros(1, len(elements), n_h, dtype=torch.float64)
    for t, element in enumerate(elements):
        swaps = transpositions(element)
        if len(swaps) > n_h:
            return None
        for j, (a, b) in enumerate(swaps):
            keys[0, t, j] = 0
            keys[0, t, j, a], keys[0, t, j, b] = math.sqrt(0.5), -math.sqrt(0.5)
            strengths[0, t, j] = 2
    return keys, strengths


@pytest.mark.parametrize(("degree", "n_h", "reached"), [(3, 1, 4), (3, 2, 6), (5, 2, 46), (5, 4, 120)])
def test_elements_that_n_h_writes_reach(degree: int, n_h: int, reached: int) -> None:
    group = list(permutations(range(degree)))
    assert sum(writes_of([element], n_h) is not None for element in group) == reached


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("degree", "n_h"), [(3, 2), (5, 4)])
def test_running_products_of_permutations_are_exact(form: Form, degree: int, n_h: int) -> None:
    """The state holds value i in row i at the start; each token permutes the rows by n_h writes."""
    group = list(permutations(range(degree)))
    chosen = torch.randint(len(group), (500,), generator=torch.Generator().manual_seed(degree)).tolist()
    elements = [group[index] for index in chosen]
    keys, strengths = writes_of(elements, n_h) or pytest.fail("an element takes more writes")
    tokens = len(elements)
    queries = torch.zeros(1, tokens, degree, degree, dtype=torch.float64) + torch.eye(degree, dtype=torch.float64)
    inputs = interleave(queries, keys, torch.zeros_like(keys), torch.zeros(1, tokens, 1).double(), strengths)
    state = torch.arange(degree).double().view(1, 1, degree, 1).repeat(1, 1, 1, degree)  # row i holds i
    output, _ = form(*inputs, scale=1.0, initial_state=state)
    slots = list(range(degree))
    for t, element in enumerate(elements):
        moved = list(slots)
        for i in range(degree):
            moved[element[i]] = slots[i]
        slots = moved
        read = output[0, n_h * t + n_h - 1, :, 0]
        assert (read - torch.tensor(slots).double()).abs().max() < 1e-11


def test_two_writes_of_up_to_one_cannot_rotate() -> None:
    """I - b k k^T is positive for b <= 1, so a product of two has real eigenvalues >= 0; with b up to 2 it rotates."""
    generator = torch.Generator().manual_seed(0)
    k = torch.nn.functional.normalize(torch.randn(300, 2, 8, generator=generator, dtype=torch.float64), dim=-1)
    strengths = torch.rand(300, 2, generator=generator, dtype=torch.float64)

    def eigenvalues(b: torch.Tensor) -> torch.Tensor:
        factors = torch.eye(8, dtype=torch.float64) - b[..., None, None] * k.unsqueeze(-1) * k.unsqueeze(-2)
        return torch.linalg.eigvals(factors[:, 0] @ factors[:, 1])

    small, large = eigenvalues(strengths), eigenvalues(2 * strengths)
    assert small.imag.abs().max() < 1e-7
    assert small.real.min() > -1e-12
    assert large.imag.abs().max() > 0.5
    assert large.real.min() < -0.5
