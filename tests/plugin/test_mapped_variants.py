"""Every option of the mapped rules as a model: decoding, padding, packing and the size of the state.

`test_every_family_and_rule.py` does the same with each mixer's defaults.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from deltanet_hf.mixers.cache.cache_bytes import cache_bytes
from support.read_in_parts import read_in_parts
from support.tiny_models import LAYERS, tiny_student

TOKENS = torch.randint(3, 97, (2, 14), generator=torch.Generator().manual_seed(6))
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "elu": ("llama", {"mixer": "linear", "feature_map": "elu", "expand_kv": False}),
    "taylor": ("gemma3_text", {"mixer": "linear", "feature_map": "taylor", "feature_dim": 3, "expand_kv": False}),
    "normalised": ("phi3", {"mixer": "deltanet", "normalised": True}),
    "normalised, grouped": ("llama", {"mixer": "deltanet", "normalised": True, "expand_kv": False}),
    "implicit": ("phi3", {"mixer": "efla", "flow_step": "implicit", "expand_kv": False}),
    # With seed 0, the random weights enlarge the rounding of float32 tenfold; in float64 the difference is 1e-12.
    "explicit": ("gemma3_text", {"mixer": "efla", "flow_step": "explicit", "shared_kv": True, "seed": 1}),
    "up to 2": ("llama", {"mixer": "comba", "allow_neg_eigval": True, "expand_kv": False}),
    "conv on k": ("llama", {"conv_on": "k"}),
    "conv on k, shared": ("phi3", {"conv_on": "k", "shared_kv": True, "window": 5, "sinks": 1}),
    "conv on k, two writes": ("qwen3", {"mixer": "deltaproduct", "conv_on": "k"}),
    "three writes, grouped": ("llama", {"mixer": "deltaproduct", "num_householder": 3, "expand_kv": False}),
    "two writes, norms over all heads": ("olmo2", {"mixer": "deltaproduct", "conv_size": 0, "seed": 1}),
    "two writes, no norm": ("phi3", {"mixer": "deltaproduct", "v_activation": "silu", "output_norm": "none"}),
    "retention, grouped": ("gemma3_text", {"mixer": "retention", "expand_kv": False}),
    "deltanet, grouped": ("phi3", {"mixer": "deltanet", "expand_kv": False}),
}


@pytest.fixture(params=VARIANTS, scope="module")
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    family, changes = VARIANTS[request.param]
    return tiny_student(family, **changes)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


@torch.no_grad()
def test_prefill_decoding_packed_documents_and_short_steps_agree(model: PreTrainedModel) -> None:
    cache = DynamicCache(config=model.config)
    close(read_in_parts(model, TOKENS, [6, 1, 1, 3, 3], cache=cache), model(TOKENS).logits)
    layers: Any = [layer.self_attn for layer in model.model.layers]
    assert cache_bytes(cache) == len(TOKENS) * sum(layer.state_bytes(torch.float32) for layer in layers)
    row = TOKENS[:1]
    wanted = torch.cat([model(part).logits for part in row.split([5, 1, 8], dim=1)], dim=1)
    boundaries = torch.tensor([0, 5, 6, 14], dtype=torch.int32)
    close(model(row, cu_seq_lens_q=boundaries).logits, wanted)


@torch.no_grad()
def test_padding_writes_nothing(model: PreTrainedModel) -> None:
    left = torch.ones_like(TOKENS)
    left[1, :5] = 0
    positions = (left.cumsum(-1) - 1).clamp(min=0)
    padded, alone = DynamicCache(config=model.config), DynamicCache(config=model.config)
    cached = {"past_key_values": padded, "use_cache": True}
    logits = model(TOKENS, attention_mask=left, position_ids=positions, **cached).logits
    assert logits.isfinite().all()
    close(logits[1:, 5:], model(TOKENS[1:, 5:], past_key_values=alone, use_cache=True).logits)
    for index in range(LAYERS):
        for name, wanted in alone.layers[index].state.items():
            close(padded.layers[index].state[name][1:], wanted)
    right = left.flip(-1)
    close(model(TOKENS, attention_mask=right).logits[1:, :-5], model(TOKENS[1:, :-5]).logits)
    # A token that is padding leaves the row's state alone, the neighbour's not.
    before = [dict(layer.state) for layer in padded.layers]
    step = torch.cat([left, torch.tensor([[1], [0]])], dim=1)
    states = [{name: tensor.clone() for name, tensor in state.items() if name != "conv_tail"} for state in before]
    model(TOKENS[:, :1], attention_mask=step, position_ids=torch.tensor([[14], [9]]), **cached)
    for index, old in enumerate(states):
        for name in set(old) & {"state", "key_sum"}:
            close(padded.layers[index].state[name][1], old[name][1])
            assert not torch.equal(padded.layers[index].state[name][0], old[name][0])


def test_gradients_reach_every_parameter(model: PreTrainedModel) -> None:
    model(TOKENS, labels=TOKENS).loss.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    model.zero_grad()
    assert missing == []


@torch.no_grad()
def test_a_convolution_of_the_keys_keeps_a_third_of_the_tail() -> None:
    whole, keys = (tiny_student("llama", conv_on=parts).model.layers[0].self_attn for parts in ("qkv", "k"))
    assert 3 * keys.conv_channels == whole.conv_channels
    assert keys.state_shapes(torch.float32)["conv_tail"].shape == (32, 3)
    whole.load_state_dict({k: v for k, v in keys.state_dict().items() if not k.startswith("conv1d")}, strict=False)
    whole.conv1d.reset_parameters()
    whole.conv1d.weight[32:64] = keys.conv1d.weight  # q | k | v
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(3))
    angles = torch.arange(9.0)[None, :, None].expand(1, 9, 8)
    embeddings = (angles.cos(), angles.sin())
    close(keys(x, embeddings)[0], whole(x, embeddings)[0])
