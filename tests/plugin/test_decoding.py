"""The fused decoding step of the layer: where it is taken, and that it computes what the separate operators do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache, PreTrainedModel, StaticCache

from deltanet_hf import LayerTable
from deltanet_hf.fast import mixer
from support.plain_form import plain_form
from support.tiny_models import HYBRID, LAYERS, tiny_mixture, tiny_student

TOKENS = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(4))
WIRINGS: dict[str, dict[str, Any]] = {
    "faithful": {},
    "qwen3_5": {},
    "rope after conv": {"conv_size": 3, "qk_activation": "silu"},
    "grouped heads, conv": {"expand_kv": False, "conv_size": 4, "rope": False},
    "grouped heads, centred": {"expand_kv": False, "k_offset": True, "conv_size": 4, "allow_neg_eigval": True},
    "no norm": {"output_norm": "none", "v_activation": "silu"},
    "gated_linear": {"mixer": "gated_linear", "qk_activation": "silu"},
    "retention": {"mixer": "retention", "expand_kv": False},
    "linear": {"mixer": "linear", "conv_size": 0, "k_offset": True},
    "linear+window": {"mixer": "linear+window", "window": 3, "sinks": 1, "state_dtype": "float32", "delayed": False},
    "deltanet": {"mixer": "deltanet", "allow_neg_eigval": True},
}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of q at every fused step."""
    shapes: list[tuple[int, ...]] = []
    step_ = mixer.gated_delta_step_

    def watch(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        shapes.append(tuple(q.shape))
        return step_(q, *args, **kwargs)

    monkeypatch.setattr(mixer, "gated_delta_step_", watch)
    return shapes


def student(wiring: str, family: str = "qwen3", **changes: Any) -> PreTrainedModel:
    profile = "qwen3_5" if wiring == "qwen3_5" else "faithful"
    return tiny_student(family, profile, HYBRID, **{**WIRINGS[wiring], **changes})


def decode(model: Any, cache: Any, **kwargs: Any) -> torch.Tensor:
    """Logits of four decoding steps after a prefill of eight tokens."""
    model(TOKENS[:, :8], past_key_values=cache, use_cache=True)
    steps = [model(TOKENS[:, t : t + 1], past_key_values=cache, use_cache=True, **kwargs).logits for t in range(8, 12)]
    return torch.cat(steps, dim=1)


@torch.no_grad()
@pytest.mark.parametrize("wiring", WIRINGS)
def test_steps_equal_the_separate_operators_and_the_prefill(wiring: str, taken: list[tuple[int, ...]]) -> None:
    model = student(wiring)
    fused, separate = DynamicCache(config=model.config), DynamicCache(config=model.config)
    found = decode(model, fused)
    assert len(taken) == 4 * len(HYBRID)
    with plain_form():
        torch.testing.assert_close(found, decode(model, separate), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, model(TOKENS).logits[:, 8:], rtol=2e-4, atol=2e-4)
    for index in HYBRID:
        one, other = fused.layers[index], separate.layers[index]
        torch.testing.assert_close(one.state, other.state, rtol=1e-5, atol=1e-5)
        assert one.get_seq_length() == other.get_seq_length() == 12


@torch.no_grad()
@pytest.mark.parametrize("wiring", ["faithful", "qwen3_5"])
def test_a_compiled_step_with_a_static_cache_equals_the_prefill(wiring: str) -> None:
    """One converted layer and one with softmax attention, each of which is compiled anew."""
    profile = "qwen3_5" if wiring == "qwen3_5" else "faithful"
    model = tiny_mixture("llama", LayerTable.preset(2, profile=profile, softmax=[1]))
    cache = StaticCache(config=model.config, max_cache_len=16)
    wanted = model(TOKENS).logits[:, 8:]
    model(TOKENS[:, :8], past_key_values=cache, use_cache=True)
    address = cache.layers[0].state["state"].data_ptr()
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    steps = [step(TOKENS[:, t : t + 1], past_key_values=cache, use_cache=True).logits for t in range(8, 12)]
    torch.testing.assert_close(torch.cat(steps, dim=1), wanted, rtol=2e-4, atol=2e-4)
    assert cache.layers[0].state["state"].data_ptr() == address


@torch.no_grad()
@pytest.mark.parametrize("wiring", ["qwen3_5", "retention"])
def test_steps_in_low_precision_err_no_more_than_the_separate_operators(
    wiring: str, taken: list[tuple[int, ...]]
) -> None:
    model, lower = student(wiring), student(wiring).to(torch.bfloat16)
    wanted = decode(model, DynamicCache(config=model.config))

    def error() -> float:
        return float((decode(lower, DynamicCache(config=model.config)).float() - wanted).norm())

    fused = error()
    assert len(taken) == 2 * 4 * len(HYBRID)
    with plain_form():
        assert fused <= 1.5 * error()
    with torch.autocast("cpu", torch.bfloat16):  # takes the plain form
        assert torch.isfinite(decode(model, DynamicCache(config=model.config))).all()
    assert len(taken) == 2 * 4 * len(HYBRID)


@torch.no_grad()
@pytest.mark.parametrize("wiring", ["faithful", "linear+window"])
def test_steps_leave_a_rounded_state_alone_at_padding(wiring: str, taken: list[tuple[int, ...]]) -> None:
    model = student(wiring, state_dtype="bfloat16")
    cache = DynamicCache(config=model.config)
    model(TOKENS[:, :8], past_key_values=cache, use_cache=True)
    states = [cache.layers[index].state for index in HYBRID]
    before = [{name: tensor.clone() for name, tensor in state.items()} for state in states]
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 8] = 0
    model(TOKENS[:, 8:9], attention_mask=mask, past_key_values=cache, use_cache=True)
    assert len(taken) == len(HYBRID)
    for state, old in zip(states, before, strict=True):
        assert state["state"].dtype == torch.bfloat16
        assert torch.equal(state["state"][1], old["state"][1])
        assert not torch.equal(state["state"][0], old["state"][0])
        if "conv_tail" in state:
            assert torch.equal(state["conv_tail"][1], old["conv_tail"][1])
            assert not torch.equal(state["conv_tail"][0], old["conv_tail"][0])


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [
        {"conv_on": "k"},
        {"mixer": "linear", "conv_on": "k"},
        {"mixer": "linear", "feature_map": "elu"},
        {"mixer": "deltanet", "normalised": True},
        {"mixer": "comba"},
        {"mixer": "efla"},
        {"mixer": "kda"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_what_the_fused_step_does_not_compute(changes: dict[str, Any], taken: list[tuple[int, ...]]) -> None:
    model = tiny_student("llama", layers=(0,), **changes)
    found = decode(model, DynamicCache(config=model.config))
    assert taken == []
    torch.testing.assert_close(found, model(TOKENS).logits[:, 8:], rtol=2e-4, atol=2e-4)


@torch.no_grad()
def test_offloaded_parameters_are_not_read_directly(taken: list[tuple[int, ...]]) -> None:
    model = tiny_student("llama", "qwen3_5")
    wanted = decode(model, DynamicCache(config=model.config))
    assert len(taken) == 4 * LAYERS
    offloaded = cpu_offload(tiny_student("llama", "qwen3_5"), torch.device("cpu"))
    assert all(p.is_meta for p in offloaded.model.layers[0].self_attn.parameters())
    found = decode(offloaded, DynamicCache(config=model.config))
    assert len(taken) == 4 * LAYERS
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("part", ["decay", "conv1d"])
def test_parts_that_an_adapter_replaces_are_called(part: str, taken: list[tuple[int, ...]]) -> None:
    adapted = get_peft_model(tiny_student("llama", "qwen3_5"), LoraConfig(r=2, modules_to_save=[f"self_attn.{part}"]))
    for name, parameter in adapted.named_parameters():
        if "modules_to_save.default" in name:
            parameter.mul_(0.5)
    found = decode(adapted.eval(), DynamicCache(config=adapted.config))
    torch.testing.assert_close(found, adapted(TOKENS).logits[:, 8:], rtol=2e-4, atol=2e-4)
    assert taken == []


def test_a_cache_with_gradients_is_left_as_it_is(taken: list[tuple[int, ...]]) -> None:
    model = tiny_student("llama", "qwen3_5")
    cache = DynamicCache(config=model.config)
    loss = model(TOKENS, past_key_values=cache, use_cache=True).logits.sum()
    states = [entry.state["state"] for entry in cache.layers]
    before = [state.detach().clone() for state in states]
    with torch.no_grad():
        model(TOKENS[:, :1], past_key_values=cache, use_cache=True)
    assert taken == []
    assert all(torch.equal(state, old) for state, old in zip(states, before, strict=True))
    loss.backward()
    model(TOKENS[:, :1], past_key_values=cache, use_cache=True)
    assert taken == []


def test_a_cache_made_in_inference_mode_serves_outside_it(taken: list[tuple[int, ...]]) -> None:
    model = tiny_student("llama", "qwen3_5")
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(TOKENS[:, :8], past_key_values=cache, use_cache=True)
        model(TOKENS[:, 8:9], past_key_values=cache, use_cache=True)
    assert len(taken) == LAYERS
    with torch.no_grad():
        model(TOKENS[:, 9:10], past_key_values=cache, use_cache=True)
        assert len(taken) == LAYERS
        found = model(TOKENS[:, 10:11], past_key_values=cache, use_cache=True).logits
        assert len(taken) == 2 * LAYERS
        torch.testing.assert_close(found, model(TOKENS[:, :11]).logits[:, 10:], rtol=2e-4, atol=2e-4)
