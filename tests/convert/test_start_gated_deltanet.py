"""Start values of a converted Gated DeltaNet layer, for every family and both profiles."""

from __future__ import annotations

import pytest
import torch

from deltanet_convert.compare_to_teacher import softmax_error
from deltanet_convert.start.fitted import FitFigures
from deltanet_hf.models.families import FAMILIES
from support.blank_layers import relative_mse, started

pytestmark = pytest.mark.usefixtures("short_fit")


@pytest.mark.parametrize(
    ("model_type", "profile"), [(family, ("qwen3_5", "faithful")[number % 2]) for number, family in enumerate(FAMILIES)]
)
@torch.no_grad()
def test_keeps_the_teachers_attention_and_fits_its_output(model_type: str, profile: str) -> None:
    for index in (0, 2):  # sliding or full attention, with or without positions
        attention, layer, states, kwargs, made = started(model_type, profile, index)
        figures = FitFigures(**made)
        assert all(bool(p.isfinite().all()) for p in layer.parameters())
        assert softmax_error(attention, layer, states, kwargs) < 1e-5
        error = relative_mse(attention, layer, states, kwargs)
        assert error == pytest.approx(figures.fit_mse, rel=1e-3)  # the figures are those of the layer itself
        assert error < min(1.0, figures.search_mse)
        assert len(figures.half_life) == len(figures.beta) == layer.num_states
        assert min(figures.half_life) > 0
        assert 0 < min(figures.beta) <= max(figures.beta) < 1


def test_query_heads_read_their_own_key_value_head() -> None:
    attention, layer, *_ = started("qwen2", "faithful")
    heads, kv_heads, size = layer.num_heads, attention.config.num_key_value_heads, layer.head_dim
    for head in range(heads):
        source = head // (heads // kv_heads)
        for name in ("k_proj", "v_proj"):
            for part in ("weight", "bias"):
                got, want = getattr(getattr(layer, name), part), getattr(getattr(attention, name), part)
                assert torch.equal(got.split(size)[head], want.split(size)[source])


def test_one_state_per_key_value_head() -> None:
    attention, layer, states, kwargs, figures = started("qwen2", "faithful", expand_kv=False)
    assert torch.equal(layer.k_proj.weight, attention.k_proj.weight)
    assert len(figures["half_life"]) == attention.config.num_key_value_heads
    assert softmax_error(attention, layer, states, kwargs) < 1e-5


def test_is_reproducible_from_a_seed() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(started("llama", "qwen3_5")[1].state_dict())
    first, second = states
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_the_convolution_stays_an_identity() -> None:
    layer = started("llama", "qwen3_5")[1]
    assert torch.equal(layer.conv1d.weight[..., -1], torch.ones_like(layer.conv1d.weight[..., -1]))
    assert not layer.conv1d.weight[..., :-1].any()
