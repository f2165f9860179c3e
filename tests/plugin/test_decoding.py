"""The fused decoding steps of states and windows: where they are taken, and what they compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache, PreTrainedModel, StaticCache

from deltanet_hf import LayerTable
from deltanet_hf.fast import mixer, window
from deltanet_hf.mixers.cache.state import MixerCacheLayer
from deltanet_hf.mixers.layer.layer_call import LayerCall
from support.plain_form import plain_form
from support.read_in_parts import read_in_parts
from support.tiny_models import HYBRID, LAYERS, tiny_mixture, tiny_student

PREFILL, STEPS = 8, 4
TOKENS = torch.randint(3, 97, (2, PREFILL + STEPS), generator=torch.Generator().manual_seed(4))
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
PLACES: dict[str, dict[str, Any]] = {
    "window and sinks": {"window": 3, "sinks": 2},
    "no sinks": {"window": 4, "sinks": 0},
    "window fills while decoding": {"window": 6, "sinks": 4},
    "nothing is unseen": {"window": 30},
    "shared projections": {"window": 3, "shared_kv": True, "conv_size": 4},
    "bfloat16 state": {"window": 3, "state_dtype": "bfloat16"},
}


def watched(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> list[tuple[int, ...]]:
    """The shape of q at every call of this step."""
    shapes: list[tuple[int, ...]] = []
    step_ = getattr(place, name)
    monkeypatch.setattr(place, name, lambda q, *rest, **options: shapes.append(q.shape) or step_(q, *rest, **options))
    return shapes


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The fused steps of states."""
    return watched(monkeypatch, mixer, "gated_delta_step_")


@pytest.fixture
def of_windows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The fused steps of windows."""
    return watched(monkeypatch, window, "window_step_")


def student(wiring: str, family: str = "qwen3", **changes: Any) -> PreTrainedModel:
    profile = "qwen3_5" if wiring == "qwen3_5" else "faithful"
    return tiny_student(family, profile, HYBRID, **{**WIRINGS[wiring], **changes})


def windowed(family: str = "llama", **changes: Any) -> PreTrainedModel:
    return tiny_student(family, **({"window": 3, "sinks": 2} | changes))


def decode(model: Any, cache: Any = None) -> torch.Tensor:
    """Logits of the decoding steps after a prefill."""
    return read_in_parts(model, TOKENS, [PREFILL, *[1] * STEPS], cache=cache)[:, PREFILL:]


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
@pytest.mark.parametrize(
    ("make", "layers"), [(partial(student, "qwen3_5"), 2), (partial(student, "retention"), 2), (windowed, 4)]
)
def test_steps_in_low_precision_err_no_more_than_the_separate_operators(
    make: Callable[[], PreTrainedModel], layers: int, taken: list[tuple[int, ...]], of_windows: list[tuple[int, ...]]
) -> None:
    model, lower = make(), make().to(torch.bfloat16)
    wanted = decode(model)

    def error() -> float:
        return float((decode(lower).float() - wanted).norm())

    fused = error()
    assert len(taken) == 2 * STEPS * layers
    assert len(of_windows) == (len(taken) if make is windowed else 0)
    with plain_form():
        assert fused <= 1.5 * error()
    with torch.autocast("cpu", torch.bfloat16):  # takes the plain form
        assert torch.isfinite(decode(model)).all()
    assert len(taken) == 2 * STEPS * layers


@torch.no_grad()
@pytest.mark.parametrize("wiring", ["faithful", "linear+window", None])
def test_steps_leave_a_state_alone_at_padding(
    wiring: str | None, taken: list[tuple[int, ...]], of_windows: list[tuple[int, ...]]
) -> None:
    """A rounded one, with a window beside it and without, and one in float32."""
    model = windowed() if wiring is None else student(wiring, state_dtype="bfloat16")
    cache = DynamicCache(config=model.config)
    model(TOKENS[:, :8], past_key_values=cache, use_cache=True)
    states = [cache.layers[index].state for index in (range(LAYERS) if wiring is None else HYBRID)]
    before = [{name: tensor.clone() for name, tensor in state.items()} for state in states]
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 8] = 0
    model(TOKENS[:, 8:9], attention_mask=mask, past_key_values=cache, use_cache=True)
    assert len(taken) == len(states)
    assert len(of_windows) == (0 if wiring == "faithful" else len(states))
    for state, old in zip(states, before, strict=True):
        assert wiring is None or state["state"].dtype == torch.bfloat16
        for name, tensor in state.items():
            assert torch.equal(tensor[1], old[name][1]), name
            assert not torch.equal(tensor[0], old[name][0]), name


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
    found = decode(model)
    assert taken == []
    torch.testing.assert_close(found, model(TOKENS).logits[:, 8:], rtol=2e-4, atol=2e-4)


@torch.no_grad()
def test_offloaded_parameters_are_not_read_directly(taken: list[tuple[int, ...]]) -> None:
    model = tiny_student("llama", "qwen3_5")
    wanted = decode(model)
    assert len(taken) == 4 * LAYERS
    offloaded = cpu_offload(tiny_student("llama", "qwen3_5"), torch.device("cpu"))
    assert all(p.is_meta for p in offloaded.model.layers[0].self_attn.parameters())
    found = decode(offloaded)
    assert len(taken) == 4 * LAYERS
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("part", ["decay", "conv1d"])
def test_parts_that_an_adapter_replaces_are_called(part: str, taken: list[tuple[int, ...]]) -> None:
    adapted = get_peft_model(tiny_student("llama", "qwen3_5"), LoraConfig(r=2, modules_to_save=[f"self_attn.{part}"]))
    for name, parameter in adapted.named_parameters():
        if "modules_to_save.default" in name:
            parameter.mul_(0.5)
    found = decode(adapted.eval())
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


@torch.no_grad()
@pytest.mark.parametrize("places", PLACES)
def test_steps_of_windows_equal_the_general_path_and_the_prefill(
    places: str, of_windows: list[tuple[int, ...]]
) -> None:
    model = windowed(**PLACES[places])
    fused, general = DynamicCache(config=model.config), DynamicCache(config=model.config)
    found = decode(model, cache=fused)
    assert len(of_windows) == STEPS * LAYERS
    # Of four layers and several steps; one branch is compared below.
    rounding = 2e-2 if places == "bfloat16 state" else 2e-4
    with plain_form():
        torch.testing.assert_close(found, decode(model, cache=general), rtol=rounding, atol=rounding)
    for one, other in zip(fused.layers, general.layers, strict=True):
        torch.testing.assert_close(one.state, other.state, rtol=rounding, atol=rounding)
        assert torch.equal(one.state["numbers"], other.state["numbers"])
        assert one.get_seq_length() == PREFILL + STEPS
    if places != "bfloat16 state":  # a prefill rounds the state once
        torch.testing.assert_close(found, model(TOKENS).logits[:, PREFILL:], rtol=2e-4, atol=2e-4)
    assert len(of_windows) == STEPS * LAYERS


@torch.no_grad()
@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.bfloat16), ("mistral", torch.float32)])
def test_a_branch_steps_as_it_is_called(family: str, dtype: torch.dtype) -> None:
    """Token after token, one branch alone: outputs agree to rounding, and what is kept to the bit."""
    branch = windowed(family).model.layers[0].self_attn.window_branch.to(dtype)
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
def test_a_familys_own_window_bounds_what_is_unseen(
    family: str, window: int, of_windows: list[tuple[int, ...]]
) -> None:
    """Their windows of 8 tokens are shorter than the sequence; the share counts no token beyond them."""
    model = windowed(family, window=window)
    reaches = {layer.self_attn.window_branch.family_window for layer in model.model.layers}
    assert 8 in reaches
    found = decode(model)
    assert len(of_windows) == STEPS * LAYERS
    torch.testing.assert_close(found, model(TOKENS).logits[:, PREFILL:], rtol=2e-4, atol=2e-4)
    for layer in model.model.layers:
        if layer.self_attn.window_branch.family_window is not None:
            layer.self_attn.window_branch.family_window = 10**6
    assert (decode(model) - found).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "compiled"),
    [
        (partial(windowed, layers=(0,)), True),
        (lambda: tiny_mixture("llama", LayerTable.preset(2, profile="qwen3_5", softmax=[1])), True),
        pytest.param(partial(tiny_student, "llama", mixer="deltaproduct"), True, marks=pytest.mark.slow),
        (partial(windowed, "mistral"), False),
    ],
    ids=["window", "qwen3_5", "deltaproduct", "not compiled"],
)
def test_a_static_cache_keeps_its_addresses(make: Callable[[], PreTrainedModel], compiled: bool) -> None:
    model = make()
    cache = StaticCache(config=model.config, max_cache_len=PREFILL + STEPS)
    wanted = model(TOKENS).logits[:, PREFILL:]
    model(TOKENS[:, :PREFILL], past_key_values=cache, use_cache=True)
    converted = [layer for layer in cache.layers if isinstance(layer, MixerCacheLayer)]
    addresses = [{name: x.data_ptr() for name, x in layer.state.items()} for layer in converted]
    step = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    tokens = TOKENS[:, PREFILL:].split(1, dim=1)
    found = torch.cat([step(token, past_key_values=cache, use_cache=True).logits for token in tokens], dim=1)
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)
    assert [{name: x.data_ptr() for name, x in layer.state.items()} for layer in converted] == addresses
