"""Layers with a decay per channel start as the fitted layer with a decay per head."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deltanet_convert.start import fitted as rules
from support.blank_layers import relative_mse, started

LEVERS = {"allow_neg_eigval": True, "expand_kv": False, "qk_activation": "silu", "gate_bias": False}
WINDOW = {"window": 6, "sinks": 2}


@pytest.fixture
def fitted(short_fit: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The layers that the rules fit; the fit is short, so the tests of Gated DeltaNet's start judge its quality."""
    torch.manual_seed(0)
    found: list[Any] = []
    start = rules.start_fitted

    def recorded(attention: Any, layer: Any, *rest: Any) -> dict[str, Any]:
        found.append(layer)
        return start(attention, layer, *rest)

    monkeypatch.setattr(rules, "start_fitted", recorded)
    return found


@pytest.mark.parametrize(
    ("mixer", "changes"),
    [("kda", {}), ("kda", LEVERS), ("kda", WINDOW), ("gla", {}), ("gla", LEVERS), ("gdn2", LEVERS), ("gdn2", WINDOW)],
)
@torch.no_grad()
def test_starts_as_the_fitted_layer(fitted: list[Any], mixer: str, changes: dict[str, Any]) -> None:
    if mixer == "gla":
        changes = {name: value for name, value in changes.items() if name != "allow_neg_eigval"}
    model_type = "qwen2" if changes else "llama"
    attention, layer, states, kwargs, figures = started(model_type, mixer=mixer, **changes)
    assert all(bool(parameter.isfinite().all()) for parameter in layer.parameters())
    (scalar,) = fitted
    want, got = scalar(states, **kwargs)[0], layer(states, **kwargs)[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.std()))
    assert relative_mse(attention, layer, states, kwargs) == pytest.approx(figures["fit_mse"], rel=1e-3)
    g = layer.gates(layer.project(states), None)[0]
    torch.testing.assert_close(g, g[..., :1].expand_as(g), rtol=1e-4, atol=1e-6)
    assert float(g[..., 0].std()) > 0  # the decay depends on the token and the head
    assert layer.f_down.weight[layer.num_states :].any() or layer.num_states >= layer.head_dim


@torch.no_grad()
def test_the_channels_part_in_training(fitted: list[Any]) -> None:
    _, layer, states, kwargs, _ = started("llama", mixer="gdn2")
    names = ["f_up.weight", "decay.dt_bias", "erase_proj.weight", "write_proj.weight"]
    parameters = [layer.get_parameter(name).requires_grad_() for name in names]
    with torch.enable_grad():
        gradients = torch.autograd.grad(layer(states, **kwargs)[0].square().sum(), parameters)
    for gradient in gradients:
        by_channel = gradient.reshape(layer.num_states, layer.head_dim, -1)
        assert (by_channel - by_channel.mean(1, keepdim=True)).abs().max() > 0
    untouched = gradients[0][:, layer.num_states :]
    assert untouched.any()  # the part of the projection that begins with no effect
