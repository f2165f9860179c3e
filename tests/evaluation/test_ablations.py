"""Ablations take away exactly the part that they name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.baselines import switch_off_softmax, switch_off_state, switch_off_window
from deltanet_hf.models.restrict import restrict_to_window
from support.tiny_models import mixed_table, tiny_mixture, tiny_student, tiny_teacher

IDS = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_softmax_layers_off_equal_zeroed_output_projections() -> None:
    off, expected = (tiny_student("qwen3", layers=(0, 2)) for _ in range(2))
    before = expected(IDS).logits
    for index in (1, 3):
        expected.model.layers[index].self_attn.o_proj.weight.zero_()
    torch.testing.assert_close(switch_off_softmax(off)(IDS).logits, expected(IDS).logits)
    assert not torch.allclose(off(IDS).logits, before, atol=1e-2)
    with pytest.raises(UserError, match="no layer with softmax attention"):
        switch_off_softmax(tiny_student("llama"))


@torch.no_grad()
def test_state_off_is_the_teachers_window() -> None:
    """Without the state, the layer is the teacher's attention under the window, whose weights it has."""
    student = tiny_student("qwen3", window=6, sinks=2)
    teacher = tiny_teacher("qwen3", seed=5)
    student.load_state_dict(
        {name: _repeated(weight, student, name) for name, weight in teacher.state_dict().items()}, strict=False
    )
    windowed = restrict_to_window(tiny_teacher("qwen3", seed=5), 6, 2)
    torch.testing.assert_close(switch_off_state(student)(IDS).logits, windowed(IDS).logits, rtol=1e-3, atol=1e-3)


def _repeated(weight: torch.Tensor, student: Any, name: str) -> torch.Tensor:
    target = student.state_dict()[name]
    if weight.shape == target.shape:
        return weight
    return weight.unflatten(0, (2, -1)).repeat_interleave(2, dim=0).flatten(0, 1)


@torch.no_grad()
def test_window_off_leaves_the_state() -> None:
    off, plain = switch_off_window(tiny_student("llama", window=6)), tiny_student("llama", seed=0)
    weights = tiny_student("llama", window=6).state_dict()
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    found, expected = off(IDS).logits, plain(IDS).logits
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    for ablation in (switch_off_window, switch_off_state):
        with pytest.raises(UserError, match="no layer with a window beside its state"):
            ablation(plain)


@torch.no_grad()
def test_the_softmax_heads_of_mixed_layers_are_switched_off() -> None:
    model = tiny_mixture("llama", mixed_table("softmax", "linear"))
    mixed = model.model.layers[0].self_attn
    hidden = torch.randn(1, 5, 32)
    positions = model.model.rotary_emb(hidden, torch.arange(5)[None])
    wanted = mixed.linear(hidden, positions)[0]
    switch_off_softmax(model)
    torch.testing.assert_close(mixed(hidden, positions)[0], wanted)
    with pytest.raises(UserError, match="no layer with softmax attention"):
        switch_off_softmax(tiny_mixture("llama", mixed_table("window", "linear")))
