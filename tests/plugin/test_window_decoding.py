"""The fused decoding step of layers with a window beside the state: where it is taken, and what it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

from deltanet_hf.fast import window
from deltanet_hf.mixers.cache.state import MixerCacheLayer
from deltanet_hf.mixers.layer.layer_call import LayerCall
from support.plain_form import plain_form
from support.tiny_models import LAYERS, tiny_student

PREFILL, STEPS = 9, 6
TOKENS = torch.randint(3, 97, (2, PREFILL + STEPS), generator=torch.Generator().manual_seed(6))
PLACES: dict[str, dict[str, Any]] = {
    "window and sinks": {"window": 3, "sinks": 2},
    "no sinks": {"window": 4, "sinks": 0},
    "window fills while decoding": {"window": 8, "sinks": 4},
    "nothing is unseen": {"window": 30},
    "shared projections": {"window": 3, "shared_kv": True, "conv_size": 4},
    "bfloat16 state": {"window": 3, "state_dtype": "bfloat16"},
}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of q at every fused step of a window."""
    shapes: list[tuple[int, ...]] = []
    step_ = window.window_step_

    def watch(q: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        shapes.append(tuple(q.shape))
        return step_(q, *args, **kwargs)

    monkeypatch.setattr(window, "window_step_", watch)
    return shapes


def student(family: str = "llama", **changes: Any) -> PreTrainedModel:
    return tiny_student(family, **({"window": 3, "sinks": 2} | changes))


def decode(model: Any, mask: torch.Tensor | None = None, cache: Any = None) -> torch.Tensor:
    """Logits of the decoding steps after a prefill."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    found = []
    for first, last in [(0, PREFILL), *((t, t + 1) for t in range(PREFILL, PREFILL + STEPS))]:
        options: dict[str, Any] = {}
        if mask is not None:
            positions = (mask[:, :last].cumsum(-1) - 1).clamp(min=0)
            options = {"attention_mask": mask[:, :last], "position_ids": positions[:, first:]}
        found.append(model(TOKENS[:, first:last], past_key_values=cache, use_cache=True, **options).logits)
    return torch.cat(found[1:], dim=1)


@torch.no_grad()
@pytest.mark.parametrize("places", PLACES)
def test_steps_equal_the_general_path_and_the_prefill(places: str, taken: list[tuple[int, ...]]) -> None:
    model = student(**PLACES[places])
    fused, general = DynamicCache(config=model.config), DynamicCache(config=model.config)
    found = decode(model, cache=fused)
    assert len(taken) == STEPS * LAYERS
    rounding = (
        2e-2 if places == "bfloat16 state" else 2e-4
    )  # of four layers and six steps; one branch is compared below
    with plain_form():
        torch.testing.assert_close(found, decode(model, cache=general), rtol=rounding, atol=rounding)
    for one, other in zip(fused.layers, general.layers, strict=True):
        torch.testing.assert_close(one.state, other.state, rtol=rounding, atol=rounding)
        assert torch.equal(one.state["numbers"], other.state["numbers"])
        assert one.get_seq_length() == PREFILL + STEPS
    if places != "bfloat16 state":  # a prefill rounds the state once
        torch.testing.assert_close(found, model(TOKENS).logits[:, PREFILL:], rtol=2e-4, atol=2e-4)
    assert len(taken) == STEPS * LAYERS


@torch.no_grad()
@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.bfloat16), ("mistral", torch.float32)])
def test_a_branch_steps_as_it_is_called(family: str, dtype: torch.dtype) -> None:
    """Token after token, one branch alone: outputs agree to rounding, and what is kept to the bit."""
    branch = student(family).model.layers[0].self_attn.window_branch.to(dtype)
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    state = {name: torch.zeros(2, *x.shape, dtype=x.dtype) for name, x in branch.state_shapes(dtype).items()}
    cache = MixerCacheLayer()
    for t in range(14):
        logits, q = branch.share_proj(randn(2, 1, 32)), randn(2, 1, branch.heads, branch.head_dim)
        k, v = (randn(2, 1, branch.kv_heads, branch.head_dim) for _ in range(2))
        far, padding = torch.randn(q.shape, generator=generator).to(dtype), torch.tensor([[t % 4 == 2], [t < 3]])
        cache.put(state, t)
        wanted, kept = branch(logits, q, k, v, far, LayerCall(cache, padding, None))
        near = window.window_step(branch, q, k, v, state, padding, None, None, None)
        far = far.masked_fill(padding[:, :, None, None], 0)  # as the state's step gives it
        found = window.mixture(branch, logits, near, far)
        real = ~padding[:, 0]
        torch.testing.assert_close(
            found[real], wanted[real], rtol=4 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps
        )
        assert (found[~real] == 0).all()
        assert all(torch.equal(state[name], y) for name, y in kept.items())
    assert int(state["count"].max()) > branch.window + branch.sinks


@torch.no_grad()
@pytest.mark.parametrize(("family", "window"), [("mistral", 12), ("gemma2", 5)])
def test_a_familys_own_window_bounds_what_is_unseen(family: str, window: int, taken: list[tuple[int, ...]]) -> None:
    """Their windows of 8 tokens are shorter than the sequence; the share counts no token beyond them."""
    model = student(family, window=window)
    reaches = {layer.self_attn.window_branch.family_window for layer in model.model.layers}
    assert 8 in reaches
    found = decode(model)
    assert len(taken) == STEPS * LAYERS
    torch.testing.assert_close(found, model(TOKENS).logits[:, PREFILL:], rtol=2e-4, atol=2e-4)
    for layer in model.model.layers:
        if layer.self_attn.window_branch.family_window is not None:
            layer.self_attn.window_branch.family_window = 10**6
    assert (decode(model) - found).abs().max() > 1e-3


@torch.no_grad()
def test_a_token_of_padding_leaves_the_state_as_it_is(taken: list[tuple[int, ...]]) -> None:
    model = student()
    cache = DynamicCache(config=model.config)
    mask = torch.ones(2, PREFILL + 1, dtype=torch.long)
    model(TOKENS[:, :PREFILL], past_key_values=cache, use_cache=True)
    before = [{name: x.clone() for name, x in layer.state.items()} for layer in cache.layers]
    mask[1, -1] = 0
    model(TOKENS[:, PREFILL : PREFILL + 1], attention_mask=mask, past_key_values=cache, use_cache=True)
    assert len(taken) == LAYERS
    for layer, old in zip(cache.layers, before, strict=True):
        for name, x in layer.state.items():
            assert torch.equal(x[1], old[name][1]), name
            assert not torch.equal(x[0], old[name][0]), name


@torch.no_grad()
@pytest.mark.parametrize(("family", "compiled"), [("llama", True), ("mistral", False)])
def test_a_static_cache_keeps_its_addresses(family: str, compiled: bool) -> None:
    model = student(family, layers=(0,)) if compiled else student(family)
    cache = StaticCache(config=model.config, max_cache_len=PREFILL + STEPS)
    wanted = model(TOKENS).logits[:, PREFILL:]
    model(TOKENS[:, :PREFILL], past_key_values=cache, use_cache=True)
    mixed = cache.layers[:1] if compiled else cache.layers
    addresses = [{name: x.data_ptr() for name, x in layer.state.items()} for layer in mixed]
    step = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    tokens = TOKENS[:, PREFILL:].split(1, dim=1)
    found = torch.cat([step(token, past_key_values=cache, use_cache=True).logits for token in tokens], dim=1)
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)
    assert [{name: x.data_ptr() for name, x in layer.state.items()} for layer in mixed] == addresses


@torch.no_grad()
def test_low_precision_steps_err_no_more_than_the_general_path(taken: list[tuple[int, ...]]) -> None:
    model, lower = student(), student().to(torch.bfloat16)
    assert lower.model.layers[0].self_attn.window_branch.slopes.far_slope.dtype == torch.bfloat16
    wanted = decode(model)

    def error() -> float:
        return float((decode(lower).float() - wanted).norm())

    fused = error()
    assert len(taken) == 2 * STEPS * LAYERS
    with plain_form():
        assert fused <= 1.5 * error()
