"""A converted model computes the same with the Triton operators as with the PyTorch ones, gradients and cache too.

Without a GPU the kernels run in Triton's interpreter, on CPU tensors that are sent to them here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from deltanet_hf.fast.decoder import fast_mixer
from deltanet_hf.mixers.cache.state import MixerCacheLayer
from deltanet_hf.mixers.layer.layer_call import CacheView
from deltanet_hf.models.cache_bits import set_cache_bits
from deltanet_hf.models.far_positions import FarPositions
from deltanet_hf.models.layers import Kind, LayerTable
from deltanet_kernels.dispatch import Operator
from support.plain_form import plain_form
from support.read_in_parts import read_in_parts
from support.tiny_models import mixed_heads, tiny_mixture, tiny_student

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def send(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """send("triton") or send("torch"): every operator of the model goes there; returns the calls made."""
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a CUDA device or the interpreter")

    def choose(side: str) -> list[str]:
        calls: list[str] = []

        def unchecked(operator: Operator[..., Any, Any], call: Any) -> Any:
            calls.append(operator.__name__)
            function = operator.cpu if side == "torch" else operator.triton()
            return function(call)

        monkeypatch.setattr(Operator, "unchecked", unchecked)
        return calls

    return choose


def loss_and_gradients(model: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(tokens, attention_mask=mask, labels=tokens, use_cache=False).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


@pytest.mark.parametrize(
    ("mixer", "profile"),
    [
        pytest.param("gated_deltanet", "faithful", marks=pytest.mark.slow),
        ("gated_deltanet", "qwen3_5"),
        pytest.param("deltaproduct", "faithful", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_the_whole_model(mixer: str, profile: str, send: Callable[[str], list[str]]) -> None:
    model = tiny_student("qwen3", profile, (1,), mixer=mixer).to(DEVICE)
    tokens = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    send("torch")
    wanted = loss_and_gradients(model, tokens, mask)
    calls = send("triton")
    found = loss_and_gradients(model, tokens, mask)
    assert "chunk_gated_delta_rule" in calls
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        torch.testing.assert_close(found[name], x, rtol=1e-4, atol=1e-5 * max(1.0, x.abs().max().item()), msg=name)


@pytest.mark.parametrize(
    ("mixer", "profile", "window", "decoders"),
    [
        pytest.param("gated_deltanet", "qwen3_5", 0, {"gated_delta_step_"}, marks=pytest.mark.slow),
        ("gated_deltanet", "faithful", 3, {"gated_delta_step_", "window_step_"}),
        pytest.param("deltaproduct", "faithful", 0, {"fused_recurrent_gated_delta_rule"}, marks=pytest.mark.slow),
        pytest.param("deltanet", "faithful", 0, {"gated_delta_step_"}, marks=pytest.mark.slow),
        pytest.param("comba", "faithful", 0, {"fused_recurrent_gated_delta_rule"}, marks=pytest.mark.slow),
    ],
)
def test_prefill_and_decoding_with_a_cache(
    mixer: str, profile: str, window: int, decoders: set[str], send: Callable[[str], list[str]]
) -> None:
    model = tiny_student("llama", profile, (0,), mixer=mixer, window=window, sinks=2).to(DEVICE)
    tokens = torch.randint(3, 97, (2, 8), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    answers = []
    for side in ("torch", "triton"):
        calls = send(side)
        with torch.no_grad():
            answers.append(read_in_parts(model, tokens, [7, 1]))
        assert {"chunk_gated_delta_rule", *decoders} <= set(calls)
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    ("mixer", "changes"),
    [
        ("gated_linear", {"expand_kv": False}),
        pytest.param("retention", {}, marks=pytest.mark.slow),
        pytest.param("linear", {"window": 3, "sinks": 1, "conv_size": 0}, marks=pytest.mark.slow),
    ],
)
def test_fused_steps_of_rules_that_erase_nothing(
    mixer: str, changes: dict[str, Any], send: Callable[[str], list[str]]
) -> None:
    """Behind a prefill in PyTorch, with padding on the left of one row."""
    model = tiny_student("llama", layers=(0,), mixer=mixer, state_dtype="float32", **changes).to(DEVICE)
    tokens = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    send("torch")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    wanted = model(tokens, attention_mask=mask, position_ids=positions).logits[:, 7:]
    cache = DynamicCache(config=model.config)
    model(tokens[:, :7], attention_mask=mask[:, :7], position_ids=positions[:, :7], past_key_values=cache)
    calls = send("triton")
    found = [
        model(
            tokens[:, t : t + 1],
            attention_mask=mask[:, : t + 1],
            position_ids=positions[:, t : t + 1],
            past_key_values=cache,
        ).logits
        for t in (7, 8)
    ]
    steps = [name for name in calls if name.endswith("step_")]
    assert steps == [*["window_step_"] * bool(changes.get("window")), "gated_delta_step_"] * 2
    torch.testing.assert_close(torch.cat(found, dim=1), wanted, rtol=1e-4, atol=1e-4)


def read(model: PreTrainedModel) -> torch.Tensor:
    """Logits of a prompt of 64 tokens and of three steps."""
    tokens = torch.randint(3, 97, (1, 67), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    return read_in_parts(model, tokens, [64, 1, 1, 1])


def states(**changes: Any) -> Kind:
    """A state beside a window of 20 tokens."""
    return LayerTable.preset(1, "gated_deltanet+window", window=20, **changes).only_kind


@torch.no_grad()
@pytest.mark.usefixtures("rounding_to_nearest")
@pytest.mark.parametrize(
    ("family", "kind", "changes", "step"),
    [
        ("qwen3", mixed_heads("softmax", "window", window=20), {}, "packed_step_"),
        (
            "gemma3_text",
            mixed_heads("softmax", "window", window=20),
            {"layer_types": ["full_attention"]},
            "packed_step_",
        ),
        pytest.param(
            "llama",
            states(sinks=2, state_dtype="float32", delayed=False),
            {},
            "packed_step_",
            marks=pytest.mark.slow,
        ),
        ("llama", states(state_dtype="int8"), {}, "group_gated_delta_step_"),
    ],
    ids=["qwen3", "gemma3", "window and state", "state of what has left"],
)
def test_packed_caches_in_the_fast_form(
    family: str, kind: Kind, changes: dict[str, Any], step: str, send: Callable[[str], list[str]]
) -> None:
    """A prompt and three steps, beyond the window and over the end of a group of 32 tokens, beside the plain form."""
    model = tiny_mixture(family, LayerTable({"own": kind}, ("own",)), head_dim=64, **changes).to(DEVICE)
    set_cache_bits(model, 4)
    calls = send("triton")
    with plain_form():
        wanted = read(model)
    assert "prompt_inputs" not in calls
    torch.testing.assert_close(read(model), wanted, rtol=1e-4, atol=1e-4)
    assert {"prompt_inputs", "pack_prompt", step} <= set(calls)


@torch.inference_mode()
@pytest.mark.usefixtures("rounding_to_nearest")
def test_prompts_that_begin_in_one_row(send: Callable[[str], list[str]]) -> None:
    """Of a window and a state of what has left it, as each alone; tokens and states."""
    model = tiny_mixture("llama", LayerTable({"own": states()}, ("own",)), head_dim=64).to(DEVICE)
    set_cache_bits(model, 4)
    mixer, lengths = model.model.layers[0].self_attn, (1, 100, 31, 33, 65)
    layer = fast_mixer(mixer, False)
    x = torch.randn(1, sum(lengths), 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    bounds = torch.tensor([0, *lengths], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)
    places = torch.cat([torch.arange(length) for length in lengths])[None].to(DEVICE)
    angles, together = model.model.rotary_emb(x, places), MixerCacheLayer()
    calls = send("triton")
    view = CacheView(together, lengths=lengths)
    found = layer(x, angles, past_key_values=view, cu_seq_lens_q=bounds)[0]
    assert calls.count("chunk_group_gated_delta_rule") == calls.count("pack_prompt") == 1
    for row, (start, length) in enumerate(zip(bounds.tolist(), lengths, strict=False)):
        own, alone = slice(start, start + length), MixerCacheLayer()
        wanted = layer(x[:, own], [part[:, own] for part in angles], past_key_values=alone)[0]
        torch.testing.assert_close(found[:, own], wanted, rtol=1e-5, atol=1e-5)
        for name, held in alone.state.items():
            torch.testing.assert_close(together.state[name][row : row + 1], held, rtol=1e-5, atol=1e-5, msg=name)


@torch.no_grad()
@pytest.mark.parametrize(("bits", "operators"), [(16, {"window_attention"}), (4, {"pack_prompt", "packed_step_"})])
def test_positions_beyond_the_teachers(bits: int, operators: set[str], send: Callable[[str], list[str]]) -> None:
    """A prompt and three steps, of which the window sees sinks from position 24."""
    positions = FarPositions("yarn", 32, 128)
    table = LayerTable({"own": mixed_heads("softmax", "window", window=20, sinks=4)}, ("own",), positions=positions)
    model = set_cache_bits(tiny_mixture("llama", table, head_dim=64, max_position_embeddings=32).to(DEVICE), bits)
    send("torch" if bits == 16 else "triton")  # whose packed numbers are those of bfloat16
    with plain_form():
        wanted = read(model)
    calls = send("triton")
    torch.testing.assert_close(read(model), wanted, rtol=1e-4, atol=1e-4)
    assert operators <= set(calls)
