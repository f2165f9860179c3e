"""The scores of a window beside a state are not capped: how far that is from Gemma 2's attention, which caps them."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from support.tiny_models import tiny_student, tiny_teacher

TOKENS = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(8))


def teacher(cap: float | None) -> PreTrainedModel:
    model = tiny_teacher("gemma2", attn_logit_softcapping=cap)
    model.set_attn_implementation("eager")  # SDPA ignores the cap
    return model


@pytest.fixture(scope="module")
def uncapped() -> torch.Tensor:
    """Logits of a student with the teacher's weights, whose windows see all that the teacher's attention sees."""
    model = tiny_student("gemma2", window=32, expand_kv=False)
    model.load_state_dict(teacher(None).state_dict(), strict=False)
    with torch.no_grad():
        return model(TOKENS).logits


@torch.no_grad()
def test_without_a_cap_the_layer_is_the_teachers_attention(uncapped: torch.Tensor) -> None:
    torch.testing.assert_close(uncapped, teacher(None)(TOKENS).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_distance_falls_with_the_square_of_the_cap(uncapped: torch.Tensor) -> None:
    """cap tanh(s / cap) = s - s^3 / (3 cap^2) + ..., so a cap far above the scores hardly matters."""
    far = {cap: float((teacher(cap)(TOKENS).logits - uncapped).norm() / uncapped.norm()) for cap in (1.0, 100.0, 200.0)}
    assert far[200.0] < 2e-3 < 5e-2 < far[1.0]
    assert 3.5 < far[100.0] / far[200.0] < 4.5
