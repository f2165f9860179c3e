"""Settings that every mixer with a recurrent state shares: centred keys, write strengths up to 2, a bfloat16 state.

`test_every_family_and_rule.py` runs the settings through every family; here each one is compared with its definition.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig, StaticCache

from deltanet_hf import LayerTable
from deltanet_hf.fast.decoder import fast_mixer
from deltanet_hf.mixers.cache.cache_bytes import cache_bytes
from deltanet_hf.mixers.layer import MixCall
from deltanet_hf.mixers.layer.parts import KeyOffset, linear_products
from deltanet_kernels import naive_gated_delta_rule
from support.refusals import assert_refused
from support.tiny_models import HYBRID, LAYERS, tiny_student

TOKENS = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(4))
BARE = {"conv_size": 0, "output_norm": "none", "output_gate": False, "rope": False}
MIXERS = [{}, {"mixer": "deltaproduct", "num_householder": 2}]


def mixer_of(model: Any) -> Any:
    return model.model.layers[0].self_attn


def inputs(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(1, 9, 32, dtype=dtype, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
@pytest.mark.parametrize(
    ("strength", "qk_activation", "expand_kv"),
    [(1, "none", True), (1, "silu", False), (2, "silu", True), (2, "none", False)],
)
def test_the_layer_is_the_recurrence_on_centred_keys(strength: int, qk_activation: str, expand_kv: bool) -> None:
    changes = {"k_offset": True, "allow_neg_eigval": strength == 2, "qk_activation": qk_activation}
    mixer = mixer_of(tiny_student("llama", expand_kv=expand_kv, **changes, **BARE).double())
    x = inputs()
    q, k, v = mixer.project_qkv(x, None)
    assert mixer.k_offset.weight.shape == k.shape[2:]
    k = k - mixer.k_offset.weight
    if qk_activation == "silu":
        q, k = F.silu(q), F.silu(k)
    g, beta = mixer.decay(mixer.a_proj(x)).double(), strength * mixer.b_proj(x).sigmoid()
    wanted, _ = naive_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    found, _ = mixer(x)
    torch.testing.assert_close(found, mixer.o_proj(wanted.flatten(-2)), rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_the_writes_of_a_token_share_the_offset_of_their_head() -> None:
    part = KeyOffset(2, 3)
    part.weight.copy_(torch.arange(6.0).view(2, 3))
    k = torch.zeros(1, 1, 4, 3)
    assert part(k)[0, 0].tolist() == (-part.weight).repeat(2, 1).tolist()


@torch.no_grad()
@pytest.mark.parametrize("mixer", MIXERS, ids=["gated_deltanet", "deltaproduct"])
def test_a_strength_above_1_turns_what_was_stored(mixer: dict[str, Any]) -> None:
    """A token that writes 0 at strength 2 under a stored key reflects its value; strength 1 only erases it."""
    for allowed in (True, False):
        layer = mixer_of(tiny_student("llama", allow_neg_eigval=allowed, qk_activation="none", **mixer, **BARE))
        assert layer.max_strength == (2 if allowed else 1)
        _, beta = layer.gates(layer.project(10 * inputs(torch.float32)), None)
        assert (beta.max() > 1.5) == allowed
        assert beta.max() <= layer.max_strength
        assert not layer.gates(layer.project(inputs(torch.float32)), torch.ones(1, 9, dtype=torch.bool))[1].any()
    layer = mixer_of(tiny_student("llama", allow_neg_eigval=True, qk_activation="none", **BARE))
    key, value = torch.randn(2, 1, 1, 4, 8, generator=torch.Generator().manual_seed(1))
    k, v = key.repeat(1, 2, 1, 1), torch.cat([value, torch.zeros_like(value)], dim=1)
    beta = torch.tensor([1.0, layer.max_strength]).view(1, 2, 1).expand(1, 2, 4)
    output, _ = layer.mix(MixCall(k, k, v, (torch.zeros(1, 2, 4), beta)))
    torch.testing.assert_close(output[:, 1], -output[:, 0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("mixer", MIXERS, ids=["gated_deltanet", "deltaproduct"])
def test_a_bfloat16_state_costs_half_and_is_rounded_after_each_call(mixer: dict[str, Any]) -> None:
    full = tiny_student("qwen3", conv_size=0, **mixer)
    half = tiny_student("qwen3", conv_size=0, state_dtype="bfloat16", **mixer)
    half.load_state_dict(full.state_dict())
    caches = [DynamicCache(config=model.config) for model in (full, half)]
    logits = [
        model(TOKENS[:, :8], past_key_values=cache, use_cache=True).logits
        for model, cache in zip((full, half), caches, strict=True)
    ]
    assert torch.equal(*logits)  # rounded where it is stored, not before it is read
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        assert other.state["state"].dtype == torch.bfloat16
        assert torch.equal(other.state["state"], one.state["state"].bfloat16())
    assert 2 * cache_bytes(caches[1]) == cache_bytes(caches[0])
    layers = [mixer_of(model) for model in (full, half)]
    measured = sum(tensor[0].nbytes for tensor in caches[1].layers[0].state.values())
    assert layers[1].state_bytes(torch.float32) == measured == layers[0].state_bytes(torch.float32) / 2


@torch.no_grad()
@pytest.mark.parametrize("expand_kv", [True, False])
def test_a_step_on_a_bfloat16_state_is_the_step_on_its_values(expand_kv: bool) -> None:
    """Fused, separate, and in float32 on the rounded state: the same output, and a new state rounded once."""
    changes = {"expand_kv": expand_kv, "k_offset": True, "allow_neg_eigval": True}
    half = tiny_student("qwen3", state_dtype="bfloat16", **changes)
    full = tiny_student("qwen3", **changes)
    full.load_state_dict(half.state_dict())

    def step(model: Any, fused: bool) -> tuple[torch.Tensor, Any]:
        cache = DynamicCache(config=model.config)
        model(TOKENS[:, :8], past_key_values=cache, use_cache=True)
        for layer in cache.layers:
            layer.state["state"].copy_(layer.state["state"].bfloat16())
        x = inputs(torch.float32)[:, :1].repeat(2, 1, 1)
        positions = model.model.rotary_emb(x, torch.full((1, 1), 8))
        form = fast_mixer(mixer_of(model), may_move=False) if fused else mixer_of(model)
        output, _ = form(x, positions, past_key_values=cache)
        return output, cache.layers[0].state["state"]

    wanted, state = step(full, fused=False)
    for found, new in (step(half, fused=True), step(half, fused=False)):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        assert new.dtype == torch.bfloat16
        torch.testing.assert_close(new.float(), state, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_bfloat16_state_stays_close_in_every_dtype_and_at_its_address(dtype: torch.dtype) -> None:
    model = tiny_student("llama", "faithful", HYBRID, state_dtype="bfloat16", k_offset=True).to(dtype)
    wanted = model(TOKENS).logits[:, 8:]
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=16)):
        model(TOKENS[:, :8], past_key_values=cache, use_cache=True)
        addresses = [cache.layers[i].state["state"].data_ptr() for i in HYBRID]
        steps = [model(TOKENS[:, t : t + 1], past_key_values=cache, use_cache=True).logits for t in range(8, 12)]
        error = (torch.cat(steps, dim=1) - wanted).double().norm() / wanted.double().norm()
        assert error < (0.03 if dtype == torch.bfloat16 else 0.01)
        assert [cache.layers[i].state["state"].data_ptr() for i in HYBRID] == addresses
        assert {cache.layers[i].state["state"].dtype for i in HYBRID} == {torch.bfloat16}


def test_old_tables_have_the_settings_off() -> None:
    entry = LayerTable.preset(LAYERS).to_dict()
    settings = next(iter(entry["kinds"].values()))
    for name in ("k_offset", "allow_neg_eigval", "state_dtype"):
        del settings[name]
    settings["late_writes"] = 0
    kind = LayerTable.from_dict(entry, LAYERS).only_kind
    assert (kind.settings.k_offset, kind.settings.allow_neg_eigval, kind.settings.state_dtype) == (
        False,
        False,
        "float32",
    )


def test_wrong_values_are_named() -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"k_offset": 1}, "k_offset: got 1, expected true or false"),
        ({"allow_neg_eigval": "yes"}, "allow_neg_eigval: got 'yes', expected true or false"),
        ({"state_dtype": "float16"}, "state_dtype: got 'float16', expected one of float32, bfloat16, int8"),
        ({"state_dtype": "int8"}, "state_dtype: got int8, which needs delayed; take float32 or bfloat16"),
        ({"late_writes": 8}, "late_writes: unknown key"),
    ]
    rows += [({"mixer": "deltaproduct", "num_householder": n}, ".*at least 1") for n in (0, True, "two")]
    preset = functools.partial(LayerTable.preset, LAYERS)
    assert_refused(preset, [(change, ValueError, message) for change, message in rows])


@pytest.mark.parametrize(
    ("mixer", "hidden_size", "head_dim", "rank"),
    [
        ("gated_deltanet", 2048, 64, 64),
        ("gated_deltanet", 4096, 128, 128),
        ("gated_deltanet", 1984, 64, 0),
        ("gated_deltanet+window", 4096, 128, 128),
        ("kda", 2048, 64, 64),
        ("deltaproduct", 4096, 128, 128),
    ],
)
def test_wide_teachers_get_a_narrow_output_gate(mixer: str, hidden_size: int, head_dim: int, rank: int) -> None:
    teacher = LlamaConfig(hidden_size=hidden_size, num_attention_heads=hidden_size // head_dim)

    def found(**changes: Any) -> Any:
        return LayerTable.preset(2, mixer, teacher=teacher, **changes).only_kind.settings

    assert found().output_gate_rank == rank
    assert found(output_gate_rank=7).output_gate_rank == 7
    assert LayerTable.preset(2, mixer).only_kind.settings.output_gate_rank == 0


def test_wide_teachers_keep_the_layer_of_qwen3_5() -> None:
    teacher = LlamaConfig(hidden_size=4096, num_attention_heads=32)
    table = LayerTable.preset(2, "gated_deltanet", "qwen3_5", teacher=teacher)
    assert table.only_kind.settings.output_gate_rank == 0
    window: Any = LayerTable.preset(2, "window", teacher=teacher).only_kind.settings
    assert window.window == 481


def test_layers_of_few_outputs_are_one_product_in_training() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 8), None, nn.Linear(16, 3, bias=False), nn.Linear(16, 2), Doubled(16, 5)]
    x = torch.randn(2, 4, 16, requires_grad=True)
    wanted = [None if layer is None else layer(x) for layer in layers]
    found = linear_products(x, layers)
    parameters = [x, *(p for layer in layers if layer is not None for p in layer.parameters())]
    gradients = []
    for outputs in (wanted, found):
        assert [output is None for output in outputs] == [layer is None for layer in layers]
        total = sum(output.sin().sum() for output in outputs if output is not None)
        gradients.append(torch.autograd.grad(total, parameters))
    for one, other in zip([*wanted, *gradients[0]], [*found, *gradients[1]], strict=True):
        torch.testing.assert_close(one, other)


def test_what_is_put_around_a_layer_of_few_outputs_is_obeyed_in_training() -> None:
    """A hook, as pruning has, and another forward, as offloading puts into the module."""
    layers = [nn.Linear(16, out) for out in (3, 2, 5, 1)]
    layers[1].register_forward_hook(lambda module, args, output: 2 * output)
    layers[2].forward = lambda x: 3 * nn.Linear.forward(layers[2], x)  # type: ignore[method-assign]
    x = torch.randn(2, 4, 16, requires_grad=True)
    for found, layer in zip(linear_products(x, layers), layers, strict=True):
        torch.testing.assert_close(found, layer(x))


class Doubled(nn.Linear):
    """As an adapter: its output is not that of its weight and bias alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)
