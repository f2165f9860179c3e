"""Changes to a converted model: its linear layers switched off, and the unfitted start."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.baselines import from_scratch_start, linear_layers, switch_off_linear, untrained
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
@pytest.mark.parametrize(("model_type", "profile"), [("llama", "qwen3_5"), ("olmo2", "faithful"), ("phi3", "faithful")])
def test_unfitted_start_has_the_teachers_projections(model_type: str, profile: str) -> None:
    teacher = tiny_teacher(model_type, seed=1)
    student = from_scratch_start(tiny_student(model_type, profile, (0, 2), seed=2), teacher)
    layer, attention = student.model.layers[0].self_attn, teacher.model.layers[0].self_attn
    rows = layer.k_proj.weight.unflatten(0, (4, -1))
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[1], rows[2])
    if model_type == "phi3":
        taught = attention.qkv_proj.weight[4 * layer.head_dim :][: layer.head_dim]
    else:
        taught = attention.k_proj.weight[: layer.head_dim]
    assert torch.equal(rows[0], taught)
    assert torch.equal(layer.o_proj.weight, attention.o_proj.weight)
    assert torch.equal(layer.norm.weight, torch.ones_like(layer.norm.weight))
    torch.testing.assert_close(layer.decay.A_log.exp(), torch.linspace(1, 16, 4))
    for name, weight in teacher.state_dict().items():
        if "layers.0.self_attn" not in name and "layers.2.self_attn" not in name:
            assert torch.equal(student.state_dict()[name], weight), name


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_unfitted_start_of_mixed_heads(model_type: str) -> None:
    """The teacher's rows are those of each branch's heads; switched off, the linear heads give nothing."""
    teacher = tiny_teacher(model_type, seed=1)
    student = from_scratch_start(tiny_mixture(model_type, mixed_table("softmax", "linear"), seed=2), teacher)
    mixed, attention = student.model.layers[1].self_attn, teacher.model.layers[1].self_attn
    size = mixed.linear.head_dim
    keys = attention.qkv_proj.weight[4 * size : 6 * size] if model_type == "phi3" else attention.k_proj.weight
    assert torch.equal(mixed.linear.k_proj.weight, keys[size:].repeat(2, 1))
    assert torch.equal(mixed.linear.o_proj.weight, attention.o_proj.weight[:, 2 * size :])
    for name, weight in mixed.part_of(attention, "softmax").state_dict().items():
        assert torch.equal(mixed.softmax.state_dict()[name], weight)
    hidden = torch.randn(1, 5, 32)
    positions = student.model.rotary_emb(hidden, torch.arange(5)[None])
    wanted = mixed.softmax(hidden_states=hidden, position_embeddings=positions, attention_mask=None)[0]
    switch_off_linear(student)
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


@torch.no_grad()
def test_unfitted_start_is_deterministic() -> None:
    teacher = tiny_teacher("llama", seed=1)
    logits = [from_scratch_start(tiny_student("llama", seed=s), teacher, seed=5)(IDS).logits for s in (2, 3)]
    torch.testing.assert_close(*logits)
    other = from_scratch_start(tiny_student("llama", seed=2), teacher, seed=6)(IDS).logits
    assert not torch.allclose(logits[0], other)


def test_softmax_models_are_refused() -> None:
    with pytest.raises(UserError, match="no layer with a recurrent state"):
        switch_off_linear(tiny_teacher("llama"))
