"""Models whose layers have a window beside the state: caches and assigned weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

from deltanet_hf.mixers.cache.cache_bytes import cache_bytes
from support.tiny_models import HYBRID, READS_ALL, mixed_heads, mixed_table, tiny_mixture, tiny_student

WINDOW, SINKS = 5, 2
IDS = torch.randint(3, 97, (2, 3 * WINDOW + 6), generator=torch.Generator().manual_seed(7))
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
BESIDE: dict[str, Any] = {
    "mixer": "gated_deltanet+window",
    "window": WINDOW,
    "sinks": SINKS,
    **READS_ALL,
    "state_dtype": "float32",
}


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_student("gemma3_text", layers=HYBRID, **BESIDE)


def held(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of all states, as the plan of a conversion counts them."""
    return sum(layer.self_attn.state_bytes(dtype) for layer in model.model.layers)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "dtype", "state_dtype"),
    [("mistral", torch.float32, "bfloat16"), ("gemma2", torch.bfloat16, "float32")],
    ids=str,
)
def test_a_cache_has_the_bytes_of_the_plan_at_any_length(family: str, dtype: torch.dtype, state_dtype: str) -> None:
    model = tiny_student(family, **{**BESIDE, "state_dtype": state_dtype}).to(dtype)
    cache, sizes = DynamicCache(config=model.config), []
    for part in IDS.split([1, WINDOW, 2 * WINDOW, *[1] * 5], dim=1):
        model(part, past_key_values=cache, use_cache=True)
        sizes.append(cache_bytes(cache))
    assert cache.get_seq_length() == IDS.shape[1] > 3 * WINDOW
    assert set(sizes) == {2 * held(model, dtype)}
    heads, size = model.config.num_key_value_heads, model.model.layers[1].self_attn.head_dim
    mixer = model.model.layers[1].self_attn
    places = 5 if family == "mistral" else 7  # the family's own window loses the sinks
    kept = places * (2 * heads * size * dtype.itemsize + 4) + 4
    channels = mixer.conv_channels * (mixer.settings.conv_size - 1) * dtype.itemsize
    state = heads * size * size * getattr(torch, state_dtype).itemsize
    assert mixer.state_bytes(dtype) == kept + channels + state
    assert mixer.stored_bytes(dtype, 100, 16) == places * 2 * heads * size * dtype.itemsize + channels + state


def left_padded(ids: torch.Tensor, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows with a shorter first one, and their mask."""
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return ids.masked_fill(mask == 0, 0), mask


@torch.no_grad()
def test_a_static_cache_gives_the_same_tokens_and_is_reset(model: PreTrainedModel) -> None:
    ids, mask = left_padded(IDS, 4)
    dynamic = model.generate(ids, attention_mask=mask, **GREEDY)
    static = model.generate(ids, attention_mask=mask, cache_implementation="static", disable_compile=True, **GREEDY)
    assert static.tolist() == dynamic.tolist()
    cache = StaticCache(config=model.config, max_cache_len=32)
    first = model(IDS, past_key_values=cache, use_cache=True).logits
    addresses = [tensor.data_ptr() for index in HYBRID for tensor in cache.layers[index].state.values()]
    cache.reset()
    torch.testing.assert_close(model(IDS, past_key_values=cache, use_cache=True).logits, first)
    assert addresses == [tensor.data_ptr() for index in HYBRID for tensor in cache.layers[index].state.values()]


def test_assigned_weights_serve_and_train(model: PreTrainedModel) -> None:
    """`load_state_dict(assign=True)` puts the given tensors themselves into the model."""
    other = type(model)(model.config).eval()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other.load_state_dict(tensors, assign=True)
    key = "model.layers.0.self_attn.window_branch.slopes.near_slope"
    assert other.get_parameter(key).data_ptr() == tensors[key].data_ptr()
    with torch.no_grad():
        assert torch.equal(other(IDS).logits, model(IDS).logits)
    other.train()(IDS, labels=IDS).loss.backward()
    assert [name for name, p in other.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


@torch.no_grad()
def test_linear_heads_with_a_window_beside_other_heads() -> None:
    """In mixed heads the window's bytes are those of its heads only, and rows do not depend on each other."""
    both = mixed_heads("window", "linear").settings.linear.to_dict() | {"window": WINDOW, "sinks": SINKS}
    model = tiny_mixture("llama", mixed_table("softmax", "linear", linear=both))
    ids, mask = left_padded(IDS, WINDOW + SINKS)
    cache = DynamicCache(config=model.config)
    model(IDS, past_key_values=cache, use_cache=True)
    growing = sum(2 * layer.self_attn.growing_heads * 8 * IDS.shape[1] * 4 for layer in model.model.layers)
    assert cache_bytes(cache) == 2 * (held(model) + growing)
    batch = model.generate(ids, attention_mask=mask, **GREEDY)
    alone = model.generate(ids[:1, WINDOW + SINKS :], **GREEDY)
    assert batch[0, WINDOW + SINKS :].tolist() == alone[0].tolist()
