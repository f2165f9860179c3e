"""The fit of a converted layer's own parameters, on data with a known solution and in edge cases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from deltanet_convert.start import components, gate_fit
from deltanet_convert.start import samples as samples_module
from deltanet_convert.start.copy_weights import copy_attention
from deltanet_convert.start.gate_fit import GateFit, descend, inverse_silu, relative_mse, search_memory
from deltanet_convert.start.samples import Samples
from support.blank_layers import blank_layer, layer_inputs
from support.tiny_models import tiny_teacher


def prepared(
    profile: str = "faithful", sequences: int = 2, tokens: int = 48, **changes: Any
) -> tuple[Any, GateFit, Samples, dict[str, Any]]:
    """Makes a layer with the teacher's weights, its fit and its samples."""
    attention, states, kwargs = layer_inputs(tiny_teacher("llama", attn_implementation="eager"), 0, sequences, tokens)
    layer = blank_layer("llama", profile, 0, **changes)
    copy_attention(attention, layer)
    torch.manual_seed(0)
    samples = Samples(attention, layer, states, kwargs)
    return layer, GateFit(layer, samples), samples, kwargs


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_fit, "STEPS", 6)


def scatter(fit: GateFit) -> None:
    """Sets fitted values that all differ, so that no result is correct only because they are constant."""
    with torch.no_grad():
        for parameter in fit.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("profile", ["qwen3_5", "faithful"])
@torch.no_grad()
def test_the_folded_layer_is_the_fitted_one(profile: str) -> None:
    layer, fit, samples, kwargs = prepared(profile)
    scatter(fit)
    fit.fold()
    for sample in (samples[0], samples[1]):
        torch.testing.assert_close(layer(sample.x, **kwargs)[0], fit(sample), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("profile", ["qwen3_5", "faithful"])
@torch.no_grad()
def test_a_low_rank_gate_is_the_fitted_one(profile: str) -> None:
    layer, fit, samples, kwargs = prepared(profile, output_gate_rank=len(GateFit(*prepared(profile)[::2]).basis) + 2)
    scatter(fit)
    fit.fold()
    assert all(parameter.isfinite().all() for parameter in layer.parameters())
    torch.testing.assert_close(layer(samples[0].x, **kwargs)[0], fit(samples[0]), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_gate_of_too_small_a_rank_is_the_nearest_on_the_calibration_text() -> None:
    errors = []
    for rank in (1, 2):
        layer, fit, samples, _ = prepared(output_gate_rank=rank)
        scatter(fit)
        gate = fit.gates(samples.x)[2].flatten(-2)
        fit.fold()
        errors.append(float((layer.g_proj(layer.g_down(samples.x)) - gate).square().mean()))
        values = torch.linalg.svdvals(fit.gate)
        assert errors[-1] == pytest.approx(float(values[rank:].square().sum()) / gate.shape[-1], rel=0.05)
    assert errors[1] < errors[0]


@torch.no_grad()
def test_the_search_finds_the_memory_that_made_the_target() -> None:
    layer, fit, samples, _ = prepared()
    states = layer.num_states
    half_life = torch.tensor([gate_fit.HALF_LIVES[1 + i % 4] for i in range(states)])
    strength = torch.tensor([gate_fit.STRENGTHS[2 + i % 2] for i in range(states)])
    channels = torch.rand(layer.num_heads, layer.head_dim) + 0.5
    fit.set_memory(half_life, strength)
    fit.set_channels(channels)
    part = samples.search_part()
    o, _ = fit.read(part)
    part.heads.copy_(F.normalize(o, dim=-1) * layer.head_dim**0.5 * channels)
    wanted = {name: value.clone() for name, value in fit.state_dict().items()}
    fit.set_memory(torch.ones(states), torch.full((states,), 0.9))
    fit.set_channels(torch.ones_like(channels))
    search_memory(fit, part)
    torch.testing.assert_close(fit.A_log, wanted["A_log"])
    torch.testing.assert_close(fit.b_const, wanted["b_const"])
    torch.testing.assert_close(fit.weight, wanted["weight"], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("profile", ["qwen3_5", "faithful"])
def test_descent_learns_gates_that_depend_on_the_input(profile: str) -> None:
    layer, fit, samples, _ = prepared(profile, sequences=4, tokens=100)
    fit.set_memory(torch.full((layer.num_states,), 8.0), torch.full((layer.num_states,), 0.2))
    start = {name: value.clone() for name, value in fit.state_dict().items()}
    scatter(fit)
    with torch.no_grad():
        for sample in samples.kept:
            sample.heads.copy_(fit.heads(sample))
            sample.output.copy_(fit(sample))
    fit.load_state_dict(start)
    before = relative_mse(fit, samples)
    descend(fit, samples)
    assert relative_mse(fit, samples) < 0.3 * before


def test_few_tokens_leave_few_components() -> None:
    _, small, _, _ = prepared(sequences=1, tokens=20)
    _, large, _, _ = prepared(sequences=2, tokens=100)
    assert len(small.basis) == 1
    assert len(large.basis) == 200 // components.TOKENS_PER_COMPONENT


@torch.no_grad()
def test_constants_without_biases_come_from_a_direction() -> None:
    layer, _, _, _ = prepared("qwen3_5")
    generator = torch.Generator().manual_seed(2)
    x, other = (torch.randn(1, 400, 32, generator=generator) * 0.3 for _ in range(2))
    common = torch.randn(32, generator=generator)  # a component of all inputs, as in trained models
    fit = GateFit(layer, SimpleNamespace(x=x + common))  # type: ignore[arg-type]
    fit.set_memory(torch.full((layer.num_states,), 16.0), torch.full((layer.num_states,), 0.1))
    fit.fold()
    assert layer.b_proj.bias is None
    assert layer.g_proj.bias is None
    torch.testing.assert_close(layer.b_proj(other + common).sigmoid().mean(), torch.tensor(0.1), rtol=0.05, atol=0)
    gate = F.silu(layer.g_proj(other + common))
    torch.testing.assert_close(gate, torch.ones_like(gate), rtol=0, atol=0.4)
    assert float((gate - 1).square().mean().sqrt()) < 0.1


@torch.no_grad()
def test_sequences_beyond_the_kept_ones_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_module, "KEPT_BYTES", 1)
    _, _, samples, _ = prepared(sequences=3, tokens=16)
    assert len(samples.kept) == 1
    monkeypatch.undo()
    _, _, kept, _ = prepared(sequences=3, tokens=16)
    torch.testing.assert_close(samples[2].output, kept.kept[2].output)
    torch.testing.assert_close(samples[2].q, kept.kept[2].q)


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("tokens", [1, 65])
def test_short_and_ragged_sequences(tokens: int) -> None:
    _, fit, samples, _ = prepared(sequences=1, tokens=tokens)
    search_memory(fit, samples.search_part())
    descend(fit, samples)
    assert all(bool(parameter.isfinite().all()) for parameter in fit.parameters())


@pytest.mark.usefixtures("few_steps")
@torch.no_grad()
def test_a_silent_teacher_leaves_finite_values() -> None:
    layer, fit, samples, _ = prepared(sequences=1, tokens=8)
    layer.o_proj.weight.zero_()
    for sample in samples.kept:
        sample.output.zero_()
        sample.heads.zero_()
    search_memory(fit, samples.search_part())
    descend(fit, samples)
    fit.fold()
    assert all(bool(p.isfinite().all()) for p in layer.parameters())


def test_inverse_silu() -> None:
    y = torch.tensor([-0.2, -0.1, 0.0, 0.01, 0.5, 1.0, 7.0, 300.0])
    torch.testing.assert_close(F.silu(inverse_silu(y)), y, rtol=1e-4, atol=1e-5)
    assert float(inverse_silu(torch.tensor(-5.0))) == float(inverse_silu(torch.tensor(-0.2)))
