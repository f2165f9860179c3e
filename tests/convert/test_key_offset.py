"""The start of centred keys, of write strengths up to 2, and of both in a complete conversion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from deltanet_convert.compare_to_teacher import softmax_error
from deltanet_convert.start.copy_weights import copy_attention
from deltanet_convert.start.fitted import FitFigures, start_fitted
from deltanet_convert.start.gate_fit import GateFit, search_memory
from deltanet_convert.start.key_offset import SHARES, choose_key_offset, mean_keys
from deltanet_convert.start.samples import LayerCalibration, Samples
from deltanet_hf.models.families import FAMILIES
from support.blank_layers import blank_layer, layer_inputs, relative_mse, started
from support.tiny_conversion import teacher_folder, tiny_conversion
from support.tiny_models import tiny_teacher

pytestmark = pytest.mark.usefixtures("short_fit")


def case(
    model_type: str = "llama", common: float = 0.0, sequences: int = 4, **changes: Any
) -> tuple[Any, Any, torch.Tensor, dict[str, Any]]:
    """The teacher's attention, whose keys share a direction of the size `common`, a blank layer, and the inputs."""
    teacher = tiny_teacher(model_type, attn_implementation="eager", **({} if common == 0 else {"rope_theta": 1e6}))
    if common:
        bias = teacher.model.layers[0].self_attn.k_proj.bias
        bias.data[bias.numel() // 4 - 1 :: bias.numel() // 2] += common  # in the slowest rotary pair of each head
    attention, states, kwargs = layer_inputs(teacher, 0, sequences)
    return attention, blank_layer(model_type, "faithful", 0, k_offset=True, **changes), states, kwargs


def centred_keys(layer: Any, states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    keys = [layer.k_offset(layer.project_qkv(x, kwargs.get("position_embeddings"))[1]) for x in states.split(1)]
    return torch.cat(keys)[:, 1:]


@torch.no_grad()
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("qwen3", {"qk_activation": "silu"}),
        ("phi3", {"expand_kv": False}),
        ("smollm3", {"qk_activation": "silu", "expand_kv": False}),
        ("qwen2", {"window": 5, "sinks": 2, "shared_kv": True}),
    ],
)
def test_the_offset_is_a_share_of_the_mean_key(model_type: str, changes: dict[str, Any]) -> None:
    attention, layer, states, kwargs = case(model_type, **changes)
    figures = FitFigures(**start_fitted(attention, layer, LayerCalibration(states, kwargs)))
    assert softmax_error(attention, layer, states, kwargs) < 1e-5
    assert len(figures.k_offset) == layer.num_states
    assert set(figures.k_offset) <= set(SHARES)
    offset = layer.k_offset.weight.clone()
    shares = torch.tensor(figures.k_offset).unsqueeze(-1)
    layer.k_offset.weight.zero_()
    mean = centred_keys(layer, states, kwargs).mean((0, 1))
    torch.testing.assert_close(offset, shares * mean, rtol=1e-4, atol=1e-5)
    layer.k_offset.weight.copy_(mean)
    centred = centred_keys(layer, states, kwargs)
    assert centred.mean((0, 1)).abs().max() < 1e-5 * centred.abs().max()
    layer.k_offset.weight.copy_(offset)
    error = relative_mse(attention, layer, states, kwargs)
    assert error == pytest.approx(figures.fit_mse, rel=1e-3)  # the samples had the keys of the layer itself


@torch.no_grad()
def test_softmax_over_the_centred_keys_is_the_teachers() -> None:
    attention, layer, states, kwargs = case(common=4.0)
    start_fitted(attention, layer, LayerCalibration(states, kwargs))
    q, k, _ = layer.project_qkv(states[:1], kwargs["position_embeddings"])
    assert layer.k_offset.weight.abs().max() > 1
    plain, centred = (torch.einsum("bthd,bshd->bhts", q, keys).softmax(-1) for keys in (k, layer.k_offset(k)))
    torch.testing.assert_close(centred, plain, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_keys_that_share_a_direction_are_centred() -> None:
    attention, layer, states, kwargs = case(common=8.0)
    copy_attention(attention, layer)
    samples = Samples(attention, layer, states, kwargs)
    fit = GateFit(layer, samples)
    shares = choose_key_offset(layer, fit, samples)
    assert sum(share > 0 for share in shares) >= layer.num_states - 1
    errors = []
    for offset in (layer.k_offset.weight.clone(), torch.zeros_like(layer.k_offset.weight)):
        layer.k_offset.weight.copy_(offset)
        samples.update_keys()
        seen, unseen = samples.halves()
        search_memory(fit, seen)
        errors.append(float((fit(unseen) - unseen.output).square().sum()))
    assert errors[0] < errors[1]


@torch.no_grad()
def test_the_share_is_chosen_on_sequences_that_the_search_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state for which every share but .5 is made worse on the unseen half takes .5."""
    attention, layer, states, kwargs = case()
    copy_attention(attention, layer)
    samples = Samples(attention, layer, states, kwargs)
    fit = GateFit(layer, samples)
    seen, unseen = samples.halves()
    assert torch.equal(torch.cat([seen.x, unseen.x]), states)
    mean, heads = mean_keys(layer, samples), GateFit.heads

    def worse(self: GateFit, s: Any) -> torch.Tensor:
        if torch.equal(s.x, unseen.x) and torch.allclose(layer.k_offset.weight, 0.5 * mean):
            return s.heads
        return heads(self, s)

    monkeypatch.setattr(GateFit, "heads", worse)
    assert choose_key_offset(layer, fit, samples) == [0.5] * layer.num_states


@torch.no_grad()
@pytest.mark.parametrize(("sequences", "tokens"), [(1, 1), (1, 2), (1, 9), (3, 9)])
def test_few_and_short_sequences(sequences: int, tokens: int) -> None:
    attention, states, kwargs = layer_inputs(tiny_teacher("qwen3", attn_implementation="eager"), 0, sequences, tokens)
    layer = blank_layer("qwen3", "faithful", 0, k_offset=True)
    figures = start_fitted(attention, layer, LayerCalibration(states, kwargs))
    assert len(figures["k_offset"]) == layer.num_states
    assert all(bool(p.isfinite().all()) for p in layer.parameters())


@torch.no_grad()
def test_strengths_up_to_2_start_with_the_same_strengths() -> None:
    attention, states, kwargs = layer_inputs(tiny_teacher("llama", attn_implementation="eager"), 0)
    layers, fits = [], []
    for allowed in (False, True):
        layer = blank_layer("llama", "faithful", 0, allow_neg_eigval=allowed)
        copy_attention(attention, layer)
        samples = Samples(attention, layer, states, kwargs)
        fit = GateFit(layer, samples)
        search_memory(fit, samples.search_part())
        layers.append(layer)
        fits.append((fit.gates(states)[1], fit(samples.search_part())))
        fit.fold()
    for found, wanted in zip(fits[1], fits[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    found, wanted = (layer.gates(layer.project(states), None)[1] for layer in (layers[1], layers[0]))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0)
    torch.testing.assert_close(layers[1](states, **kwargs)[0], layers[0](states, **kwargs)[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_further_writes_start_with_the_same_small_strength_and_centred_keys() -> None:
    _, layer, states, _, _ = started("llama", mixer="deltaproduct", k_offset=True, allow_neg_eigval=True)
    beta = layer.gates(layer.project(states), None)[1][..., : layer.num_states]
    torch.testing.assert_close(beta, torch.full_like(beta, 0.02), rtol=1e-4, atol=0)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_a_conversion_with_all_of_them(model_type: str, tmp_path: Path) -> None:
    assert model_type in FAMILIES
    teacher = teacher_folder(tmp_path / "teacher", model_type)
    changes = ("k_offset=true", "allow_neg_eigval=true", "state_dtype=bfloat16", "expand_kv=false")
    report = tiny_conversion(teacher, tmp_path / "out", layers="keep:1,3", changes=changes, dtype="bfloat16")
    converted = [layer for layer in report["layers"] if "k_offset" in layer]
    assert len(converted) == 2
    assert all(layer["softmax_error"] < 1e-5 and layer["relative_mse"] < 1 for layer in converted)
    kind = json.loads((tmp_path / "out" / "config.json").read_text())["deltanet"]["kinds"]["linear"]
    assert (kind["k_offset"], kind["allow_neg_eigval"], kind["state_dtype"]) == (True, True, "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    shares = torch.tensor(converted[0]["k_offset"])
    offset = model.model.layers[0].self_attn.k_offset.weight
    assert offset.dtype == torch.bfloat16
    assert torch.equal(offset.abs().sum(-1) > 0, shares > 0)
    tokens = model.generate(torch.tensor([[1, 5, 6, 7]]), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert tokens.shape == (1, 8)
