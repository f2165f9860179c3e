"""Start values of the rules around Gated DeltaNet: each is fitted through its own recurrence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.blank_layers import relative_mse, started
from support.tiny_models import READS_ALL

RULES: dict[str, dict[str, Any]] = {
    "linear": {"mixer": "linear"},
    "elu": {"mixer": "linear", "feature_map": "elu"},
    "taylor": {"mixer": "linear", "feature_map": "taylor", "feature_dim": 3},
    "retention": {"mixer": "retention"},
    "gated linear": {"mixer": "gated_linear"},
    "deltanet": {"mixer": "deltanet"},
    "normalised": {"mixer": "deltanet", "normalised": True},
    "exact": {"mixer": "efla"},
    "implicit": {"mixer": "efla", "flow_step": "implicit"},
    "explicit": {"mixer": "efla", "flow_step": "explicit"},
    "comba": {"mixer": "comba"},
    "window": {"mixer": "efla+window", "window": 5, "sinks": 1, **READS_ALL},
}


pytestmark = pytest.mark.usefixtures("short_fit")


@pytest.mark.parametrize("changes", RULES.values(), ids=RULES)
@torch.no_grad()
def test_the_figures_are_those_of_the_layer_and_the_fit_gains(changes: dict[str, Any]) -> None:
    attention, layer, states, kwargs, figures = started("llama", **changes)
    assert all(bool(p.isfinite().all()) for p in layer.parameters())
    error = relative_mse(attention, layer, states, kwargs)
    assert error == pytest.approx(figures["fit_mse"], rel=1e-3)
    assert error < min(1.0, figures["search_mse"])
    assert len(figures["half_life"]) == (0 if layer.decays == "never" else layer.num_states)
    assert len(figures["beta"]) == (0 if layer.strengths == "one" else layer.num_states)


@pytest.mark.parametrize("flow_step", ["exact", "implicit", "explicit"])
@torch.no_grad()
def test_a_constant_strength_of_efla_is_that_of_a_key_of_mean_length(flow_step: str) -> None:
    """The steps are scaled by the keys as the state sees them, after the offset."""
    _, layer, states, kwargs, _ = started("llama", mixer="efla", flow_step=flow_step)
    _, k, _ = layer.project_qkv(states[:1], kwargs["position_embeddings"])
    size = layer.k_offset(k)[:, 1:].square().sum(-1).mean((0, 1))
    torch.testing.assert_close(layer.step_length.log_scale, -size.log())
    beta = torch.tensor([0.01, 0.2, 0.6, 0.9])
    eta = layer.strength(layer.strength_logit(beta))
    x = eta * size  # of a key with |k|^2 = size
    found = {"exact": -torch.expm1(-x), "implicit": x / (1 + x), "explicit": x.clamp_max(1)}[flow_step]
    torch.testing.assert_close(found, beta, rtol=1e-5, atol=1e-6)
