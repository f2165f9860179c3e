"""Changes to a converted model: its linear layers switched off, and the model before its training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.baselines import linear_layers, switch_off_linear, untrained
from deltanet_hf.models.cache_bits import KEY_ORDER, cache_bits_of, set_cache_bits
from deltanet_hf.models.restrict import restrict_heads
from support.tiny_models import mixed_table, tiny_mixture, tiny_student, tiny_teacher

IDS = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_linear_layers_off_equal_zeroed_output_projections() -> None:
    off = switch_off_linear(tiny_student("qwen3", layers=(0, 2)))
    expected = tiny_student("qwen3", layers=(0, 2))
    before = expected(IDS).logits
    for layer in linear_layers(expected):
        layer.o_proj.weight.zero_()
    torch.testing.assert_close(off(IDS).logits, expected(IDS).logits)
    assert not torch.allclose(off(IDS).logits, before, atol=1e-2)
    assert off.generate(IDS, max_new_tokens=4, do_sample=False).shape == (2, 24)


@torch.no_grad()
def test_linear_heads_that_are_switched_off_give_nothing() -> None:
    student = switch_off_linear(tiny_mixture("llama", mixed_table("softmax", "linear")))
    mixed, hidden = student.model.layers[1].self_attn, torch.randn(1, 5, 32)
    positions = student.model.rotary_emb(hidden, torch.arange(5)[None])
    wanted = mixed.softmax(hidden_states=hidden, position_embeddings=positions, attention_mask=None)[0]
    torch.testing.assert_close(mixed(hidden, positions)[0], wanted)


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_an_untrained_student_is_the_teacher_under_its_windows(model_type: str) -> None:
    """With its own bits and key orders."""
    teacher = tiny_teacher(model_type, seed=1)
    table = replace(mixed_table("window", "softmax", window=5, sinks=2), cache_bits=4, key_order=True)
    student = tiny_mixture(model_type, table, seed=2)
    orders = {name: order.clone() for name, order in student.named_buffers() if name.endswith(KEY_ORDER)}
    student = untrained(student, teacher)
    assert cache_bits_of(student) == 4
    assert len(orders) == 8
    assert all(torch.equal(student.get_buffer(name), order) for name, order in orders.items())
    expected = restrict_heads(tiny_teacher(model_type, seed=1), {layer: [1] for layer in range(4)}, 5, 2)
    torch.testing.assert_close(set_cache_bits(student, 16)(IDS).logits, expected(IDS).logits)


def test_softmax_models_are_refused() -> None:
    with pytest.raises(UserError, match="no layer with a recurrent state"):
        switch_off_linear(tiny_teacher("llama"))
