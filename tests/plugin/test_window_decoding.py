"""The fused decoding step of layers with a window beside the state: where it is taken, and what it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache, PreTrainedModel, StaticCache

from deltanet_hf.evaluation.baselines import switch_off_state, switch_off_window
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
    "one state per key head": {"window": 3, "expand_kv": False},
    "shared projections": {"window": 3, "shared_kv": True, "conv_size": 4},
    "no norm": {"window": 3, "output_norm": "none"},
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
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
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
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
@pytest.mark.parametrize("window", [5, 12])
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
def test_left_padded_rows_equal_the_row_alone(taken: list[tuple[int, ...]]) -> None:
    model = student()
    mask = torch.ones_like(TOKENS)
    mask[1, :7] = 0
    found = decode(model, mask)
    assert len(taken) == STEPS * LAYERS
    alone = model(TOKENS[1:, 7:]).logits[:, PREFILL - 7 :]
    torch.testing.assert_close(found[1:], alone, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(found[:1], model(TOKENS[:1]).logits[:, PREFILL:], rtol=2e-4, atol=2e-4)


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
def test_beams_reorder_what_the_window_keeps(taken: list[tuple[int, ...]]) -> None:
    model = student()
    options = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "eos_token_id": None}
    with_cache = model.generate(TOKENS, use_cache=True, **options)
    assert len(taken) == 7 * LAYERS
    assert taken[0][0] == 6
    assert with_cache.tolist() == model.generate(TOKENS, use_cache=False, **options).tolist()


@torch.no_grad()
@pytest.mark.parametrize(("family", "compiled"), [("llama", False), ("llama", True), ("mistral", False)])
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
def test_a_dynamic_cache_is_changed_in_place(taken: list[tuple[int, ...]]) -> None:
    model = student()
    cache = DynamicCache(config=model.config)
    model(TOKENS[:, :PREFILL], past_key_values=cache, use_cache=True)
    before = [dict(layer.state) for layer in cache.layers]
    model(TOKENS[:, PREFILL : PREFILL + 1], past_key_values=cache, use_cache=True)
    assert all(
        layer.state[name] is x for layer, old in zip(cache.layers, before, strict=True) for name, x in old.items()
    )


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


@torch.no_grad()
def test_an_adapter_of_the_share_is_called(taken: list[tuple[int, ...]]) -> None:
    adapted = get_peft_model(student(), LoraConfig(r=2, target_modules=["share_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.fill_(0.5)
    found = decode(adapted.eval())
    assert taken == []
    torch.testing.assert_close(found, adapted(TOKENS).logits[:, PREFILL:], rtol=2e-4, atol=2e-4)
    with adapted.disable_adapter():
        assert (decode(adapted) - found).abs().max() > 1e-3


@torch.no_grad()
def test_slopes_that_an_adapter_replaces_are_called(taken: list[tuple[int, ...]]) -> None:
    adapted = get_peft_model(student(), LoraConfig(r=2, modules_to_save=["slopes"], target_modules=["q_proj"]))
    for name, parameter in adapted.named_parameters():
        if "modules_to_save.default" in name:
            parameter.mul_(0.5)
    found = decode(adapted.eval())
    assert taken == []
    torch.testing.assert_close(found, adapted(TOKENS).logits[:, PREFILL:], rtol=2e-4, atol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize("ablation", [switch_off_window, switch_off_state])
def test_lesions_reach_the_decoding_steps(ablation: Any, taken: list[tuple[int, ...]]) -> None:
    model = student()
    intact = decode(model)
    taken.clear()
    found = decode(ablation(model))
    assert taken == []
    assert (found - intact).abs().max() > 1e-3
    torch.testing.assert_close(found, model(TOKENS).logits[:, PREFILL:], rtol=2e-4, atol=2e-4)


@torch.no_grad()
def test_dropout_of_windows_is_left_to_the_general_path(taken: list[tuple[int, ...]]) -> None:
    model = student()
    away = switch_off_window(student())
    for layer in model.train().model.layers:
        layer.self_attn.window_branch.dropout.fill_(1.0)
    torch.testing.assert_close(decode(model), decode(away), rtol=1e-5, atol=1e-5)
    assert taken == []
