"""The mixers of inner training: settings of their own, states, reductions to Gated DeltaNet, bfloat16."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from deltanet_hf import LayerTable
from deltanet_hf.mixers.cache.cache_bytes import cache_bytes
from deltanet_hf.mixers.inner_training.mesa import MesaRidge
from support.refusals import assert_refused
from support.tiny_models import HYBRID, tiny_student

TOKENS = torch.randint(3, 97, (2, 19), generator=torch.Generator().manual_seed(6))


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize("mixer", ["mesa", "ttt", "titans"])
def test_rounded_states_take_half_the_bytes(mixer: str) -> None:
    """All but the matrix that Mesa inverts, and the counter."""
    sizes = []
    for dtype in ("float32", "bfloat16"):
        model = tiny_student("llama", layers=HYBRID, mixer=mixer, state_dtype=dtype)
        layer: Any = model.model.layers[0].self_attn
        cache = DynamicCache(config=model.config)
        model(TOKENS[:1, :11], past_key_values=cache, use_cache=True)
        state = cache.layers[0].state
        assert {name: (tensor.shape[1:], tensor.dtype) for name, tensor in state.items()} == {
            name: (shape.shape, shape.dtype) for name, shape in layer.state_shapes(torch.float32).items()
        }
        sizes.append(cache_bytes(cache))
        step = model(TOKENS[:1, 11:12], past_key_values=cache, use_cache=True).logits
        whole = model(TOKENS[:1, :12]).logits[:, -1:]
        assert (step - whole).norm() < (1e-5 if dtype == "float32" else 2**-8) * whole.norm()
    matrices = 1 if mixer == "mesa" else 2
    assert sizes[0] - sizes[1] == len(HYBRID) * matrices * 4 * 8 * 8 * 2


@torch.no_grad()
def test_mini_batches_of_one_token_are_gated_deltanet() -> None:
    plain = tiny_student("llama", layers=HYBRID)
    other = tiny_student("llama", layers=HYBRID, mixer="ttt", mini_batch=1)
    other.load_state_dict(plain.state_dict())
    close(other(TOKENS).logits, plain(TOKENS).logits)


@torch.no_grad()
def test_momentum_moves_the_state_and_none_does_not() -> None:
    model = tiny_student("llama", layers=HYBRID, mixer="titans")
    logits = []
    for bias in (-1e4, -1e5, 0.0):
        for index in HYBRID:
            layer: Any = model.model.layers[index].self_attn
            layer.before_fit()
            layer.m_proj.bias.fill_(bias)
        logits.append(model(TOKENS).logits)
    assert torch.equal(logits[0], logits[1])
    assert (logits[2] - logits[0]).abs().max() > 1e-2


@torch.no_grad()
def test_the_ridge_starts_at_one_and_never_falls_below_a_quarter() -> None:
    part = MesaRidge(2, 3)
    torch.testing.assert_close(part(torch.float64), torch.ones(2, 3, dtype=torch.float64))
    part.ridge.fill_(-1e4)
    assert torch.equal(part(torch.float32), torch.full((2, 3), 0.25))


@pytest.mark.parametrize("changes", [{"mixer": "mesa"}, {"mixer": "titans"}, {"mixer": "ttt", "inner_norm": True}])
def test_autocast_trains(changes: dict[str, Any]) -> None:
    model = tiny_student("llama", layers=HYBRID, **changes)
    exact = model(TOKENS, labels=TOKENS).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    torch.testing.assert_close(loss.float(), exact, rtol=5e-2, atol=0)


def test_wrong_settings_are_named() -> None:
    rows: list[tuple[str, str, Any]] = [
        ("mesa", "cg_steps", 0),
        ("mesa", "allow_neg_eigval", True),
        ("ttt", "mini_batch", 0),
        ("ttt", "mini_batch", "16"),
        ("ttt", "inner_norm", 1),
    ]
    preset = functools.partial(LayerTable.preset, 4)
    assert_refused(
        preset, [({"mixer": mixer, name: value}, ValueError, rf"^{mixer}\.{name}: got ") for mixer, name, value in rows]
    )
