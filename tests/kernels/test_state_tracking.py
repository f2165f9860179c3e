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


@pytest.mark.parametrize("form", FORMS)
def test_parity_is_exact_with_a_strength_of_two(form: Form) -> None:
    """One key everywhere: a start token writes 1, a bit of 1 has the strength 2 and the value 0."""
    bits = torch.randint(2, (4096,), generator=torch.Generator().manual_seed(0))
    keys = torch.zeros(1, 4097, 1, 4, dtype=torch.float64)
    keys[..., 0] = 1
    values = torch.zeros_like(keys)
    values[:, 0] = 1
    beta = torch.cat([torch.ones(1), 2 * bits]).double().view(1, 4097, 1)
    output, _ = form(keys, keys, values, torch.zeros_like(beta), beta, scale=1.0)
    signs = (-1.0) ** bits.cumsum(0)
    assert (output[0, 1:, 0, 0] - signs).abs().max() < 4e-12


def transpositions(element: tuple[int, ...]) -> list[tuple[int, int]]:
    """Swaps of rows which, one after the other, move what is in row i to row element[i]."""
    found, left = [], list(element)
    for i in range(len(left)):
        while left[i] != i:
            j = left[i]
            found.append((i, j))
            left[i], left[j] = left[j], left[i]
    return found


def writes_of(elements: list[tuple[int, ...]], n_h: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [1, T, n_h, n] and strengths [1, T, n_h] that permute the rows."""
    degree = len(elements[0])
    keys = torch.zeros(1, len(elements), n_h, degree, dtype=torch.float64)
    keys[..., 0] = 1
    strengths = torch.zeros(1, len(elements), n_h, dtype=torch.float64)
    for t, element in enumerate(elements):
        for j, (a, b) in enumerate(transpositions(element)):
            keys[0, t, j] = 0
            keys[0, t, j, a], keys[0, t, j, b] = math.sqrt(0.5), -math.sqrt(0.5)
            strengths[0, t, j] = 2
    return keys, strengths


@pytest.mark.parametrize("form", FORMS)
def test_running_products_of_permutations_are_exact(form: Form) -> None:
    """The state holds value i in row i at the start; each token permutes the rows by n_h writes."""
    degree, n_h = 5, 4
    group = list(permutations(range(degree)))
    chosen = torch.randint(len(group), (500,), generator=torch.Generator().manual_seed(degree)).tolist()
    elements = [group[index] for index in chosen]
    keys, strengths = writes_of(elements, n_h)
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
