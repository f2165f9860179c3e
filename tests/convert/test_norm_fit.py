"""Inserted q/k norms keep the attention if the inputs have a constant direction, and are plain norms otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from deltanet_convert.start import norm_fit
from deltanet_convert.start.norm_config import needs_norms, with_norms
from deltanet_convert.start.norm_fit import compare_attention, constant_direction, insert_norms
from deltanet_hf.models.layers import INSERTED_QK_NORMS
from support.tiny_models import teacher_config, tiny_teacher

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "eager"}
FAMILIES = {"llama": {"attention_bias": False}, "mistral": {"sliding_window": None}, "qwen2": {}}


def inputs(model: Any, constant: float, seed: int = 0) -> tuple[Tensor, dict[str, Any]]:
    """Normalised inputs [4, 64, 64] with mean `constant` in the first channel, and the attention's other arguments."""
    x = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(seed))
    x[..., 0] = constant + 0.02 * x[..., 0]
    positions = torch.arange(64)[None]
    mask = torch.full((1, 1, 64, 64), torch.finfo(torch.float32).min).triu(1)
    return x, {"position_embeddings": model.model.rotary_emb(x, positions), "attention_mask": mask}


def both(family: str) -> tuple[Any, Any, Any]:
    """The teacher, its second layer's attention, and a Qwen3 attention with random weights.

    As in real models, heads differ in size, and some rotary pairs (here 2 and 5) have little effect.
    """
    model: Any = tiny_teacher(family, **SIZES, **FAMILIES[family])
    config = with_norms(model.config, [1])
    config._attn_implementation = "eager"
    attention = model.model.layers[1].self_attn.requires_grad_(False)
    for projection in (attention.q_proj, attention.k_proj):
        for tensor in projection.parameters():
            heads = tensor.data.unflatten(0, (-1, 16))
            heads[0] *= 2.0
            heads[:, [2, 10, 5, 13]] *= 0.05
    return model, attention, Qwen3Attention(config, 1).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_stays_what_it_was(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, attention, normed = both(family)
    x, kwargs = inputs(model, 3.0)
    fresh, _ = inputs(model, 3.0, seed=1)
    found = insert_norms(attention, normed, x, kwargs)
    assert found.size == max(norm_fit.SIZES)
    kl, error = compare_attention(attention, normed, fresh, kwargs)
    monkeypatch.setattr(norm_fit, "SIZES", (0.0,))
    assert insert_norms(attention, normed, x, kwargs).q_pairs == []
    plain_kl, plain_error = compare_attention(attention, normed, fresh, kwargs)
    assert kl < 0.2 * plain_kl
    assert error < 0.6 * plain_error


def test_without_a_constant_direction_a_plain_norm_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model, attention, normed = both("mistral")
    x, kwargs = inputs(model, 0.0)
    fresh, _ = inputs(model, 0.0, seed=1)
    assert insert_norms(attention, normed, x, kwargs).size == 0.0
    kl, _ = compare_attention(attention, normed, fresh, kwargs)
    monkeypatch.setattr(norm_fit, "SIZES", (8.0,))
    insert_norms(attention, normed, x, kwargs)
    assert kl < compare_attention(attention, normed, fresh, kwargs)[0]


def test_the_constants_do_not_reach_the_logits() -> None:
    """Only the two rotary pairs are lost: a teacher without them has the same logits."""
    model, attention, normed = both("mistral")
    x, kwargs = inputs(model, 3.0)
    x[..., 0] = 3.0  # exactly constant
    found = insert_norms(attention, normed, x, kwargs)
    for projection, repeat in ((attention.q_proj, 2), (attention.k_proj, 1)):
        rows = projection.weight.data.unflatten(0, (-1, 16))
        for head in range(len(rows)):
            for pair in (found.q_pairs[head // repeat], found.k_pairs[head // repeat]):
                rows[head, [pair, pair + 8]] = 0.0
    kl, error = compare_attention(attention, normed, x, kwargs)
    assert kl < 2e-3
    assert error < 0.03


def test_biases_ride_on_the_constant() -> None:
    """The division restores Qwen2's biases, ten times as large, although the direction is only nearly constant."""
    model, attention, normed = both("qwen2")
    for name in ("q_proj", "k_proj"):
        getattr(attention, name).bias.data.mul_(10)
    x, kwargs = inputs(model, 3.0)
    insert_norms(attention, normed, x, kwargs)
    kl, _ = compare_attention(attention, normed, x, kwargs)
    want, got = (module(hidden_states=x, **kwargs)[0] for module in (attention, normed))
    assert (want - got).square().sum() < 0.02 * want.square().sum()
    for name in ("q_proj", "k_proj"):
        getattr(attention, name).bias.data.zero_()
    assert kl < 0.02 * compare_attention(attention, normed, x, kwargs)[0]


def test_comparison_of_a_module_with_itself_is_zero() -> None:
    model, attention, _ = both("llama")
    x, kwargs = inputs(model, 1.0)
    kl, error = compare_attention(attention, attention, x, kwargs)
    assert kl == pytest.approx(0.0, abs=1e-6)
    assert error == 0.0


def test_constant_direction_serves_the_heavy_tokens() -> None:
    x = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(3))
    weights = torch.zeros(2, 40)
    weights[:, :10] = 1.0
    ones = x @ constant_direction(x, weights)
    assert (ones[:, :10] - 1).abs().mean() < 0.2 < (ones[:, 10:] - 1).abs().mean()


def test_config_becomes_qwen3s() -> None:
    teacher = teacher_config("qwen2", rope_parameters={"rope_type": "default", "rope_theta": 5e4})
    config = with_norms(teacher, [3, 1])
    assert config.model_type == "qwen3"
    assert getattr(config, INSERTED_QK_NORMS) == [1, 3]
    assert config.head_dim == 8
    assert config.rope_parameters["rope_theta"] == 5e4
    assert config.layer_types == ["full_attention"] * 4
    assert needs_norms(teacher, [1])
    assert not needs_norms(teacher, [])
    assert not needs_norms(teacher_config("qwen3"), [1])


def test_every_tensor_is_made_where_the_inputs_are() -> None:
    """A tensor made without a device would be on the meta device here, beside inputs that are not, as on a GPU."""
    model, attention, normed = both("qwen2")
    x, kwargs = inputs(model, 3.0)
    found = insert_norms(attention, normed, x, kwargs)
    wanted = {name: tensor.clone() for name, tensor in normed.state_dict().items()}
    with torch.device("meta"):
        assert insert_norms(attention, normed, x, kwargs) == found
        assert compare_attention(attention, normed, x, kwargs)[0] < 1.0
    for name, tensor in normed.state_dict().items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=0)
