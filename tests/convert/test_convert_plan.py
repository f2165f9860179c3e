"""The numbers of a plan equal those of the models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import DynamicCache, PreTrainedModel

from deltanet_convert.conversion_plan import CONTEXTS, Plan, make_plan
from deltanet_convert.views.plan_view import count, index_ranges, print_plan, size
from deltanet_hf import LayerTable
from deltanet_hf.mixers import FLOAT32_NAMES
from deltanet_hf.mixers.cache.cache_bytes import cache_bytes
from deltanet_hf.mixers.cache.mixed_cache import MixedCacheLayer
from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_hf.models.cache_bits import set_cache_bits
from support.tiny_conversion import opened
from support.tiny_models import HYBRID, LAYERS, teacher_config, tiny_student, tiny_teacher


def planned(
    folder: Path,
    family: str,
    profile: str,
    layers: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    cache_bits: int = 16,
    positions: int = 200_000,
    **changes: Any,
) -> Plan:
    tiny_teacher(family, max_position_embeddings=positions).save_pretrained(folder)
    softmax = [index for index in range(LAYERS) if index not in layers]
    table = LayerTable.preset(LAYERS, profile=profile, softmax=softmax, **changes)
    table = dataclasses.replace(table, cache_bits=cache_bits)
    return make_plan(opened(folder), table, dtype, 10**9, 256)


def cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Casts the weights as they are stored: some parameters stay float32."""
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] not in FLOAT32_NAMES:
            parameter.data = parameter.data.to(dtype)


@pytest.mark.parametrize(
    ("family", "profile"),
    [("qwen2", "qwen3_5"), ("qwen2", "faithful"), ("phi3", "faithful"), ("gpt_oss", "faithful"), ("olmoe", "qwen3_5")],
)
def test_parameters_are_those_of_the_models(tmp_path: Path, family: str, profile: str) -> None:
    plan = planned(tmp_path, family, profile, HYBRID)
    student = tiny_student(family, profile, HYBRID)
    assert plan.parameters == sum(p.numel() for p in student.parameters())
    assert plan.teacher_parameters == sum(p.numel() for p in tiny_teacher(family).parameters())
    assert [layer.index for layer in plan.layers if layer.converted] == list(HYBRID)
    for layer, module in zip(plan.layers, student.model.layers, strict=True):
        assert layer.copied + layer.expanded + layer.created == sum(p.numel() for p in module.parameters())
        if not layer.converted:
            assert layer.expanded == layer.created == layer.dropped == 0


def test_what_is_copied_expanded_created_and_dropped(tmp_path: Path) -> None:
    native, teacher = (planned(tmp_path / p, "qwen3", p, (0,)).layers[0] for p in ("qwen3_5", "faithful"))
    hidden, heads, kv, size_, inner = 32, 4, 2, 16, 48
    attention = 2 * hidden * heads * size_  # q and o
    rest = 3 * hidden * inner + 2 * hidden  # MLP, two norms
    assert native.expanded == teacher.expanded == 2 * hidden * heads * size_  # k and v, twice as many heads
    assert native.dropped == 2 * size_  # q and k norms
    assert teacher.dropped == 0
    assert native.copied == attention + rest
    assert teacher.copied == attention + rest + 2 * size_
    gates = 2 * hidden * heads + hidden * heads * size_ + 2 * heads  # a, b, g, decay
    convolution = 4 * 3 * heads * size_
    assert native.created == gates + convolution + size_  # shared norm
    biases, norm, offset = heads + heads * size_, heads * size_, heads * size_  # norm per head; keys are centred
    assert teacher.created == gates + convolution + biases + norm + offset
    assert kv < heads


@pytest.mark.parametrize("family", ["mistral", "olmo3"])
def test_kv_cache_of_windows_is_what_transformers_keeps(tmp_path: Path, family: str) -> None:
    plan, model = planned(tmp_path, family, "faithful", HYBRID), tiny_teacher(family)
    length = 33
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.ones(1, length, dtype=torch.int64), past_key_values=cache)
    for layer, kept in zip(plan.layers, cache.layers, strict=True):
        # transformers keeps one token less than the window, because the next token takes its place.
        tokens = layer.window - 1 if layer.window else length
        assert kept.keys.numel() + kept.values.numel() == tokens * layer.kv_bytes_per_token // 4
        assert layer.kv_bytes(10**6) == layer.kv_bytes_per_token * (layer.window or 10**6)


CACHES: list[tuple[str, dict[str, Any]]] = [
    ("faithful", {}),
    ("qwen3_5", {}),
    ("faithful", {"expand_kv": False}),
    ("faithful", {"conv_size": 0}),
    ("faithful", {"mixer": "mixed_heads", "heads": ["window", "linear"], "window": 3}),
    ("faithful", {"mixer": "window", "window": 3, "sinks": 0}),
]


@pytest.mark.parametrize(
    ("family", "dtype", "profile", "changes"),
    [
        (*(("qwen3", torch.float32), ("gemma2", torch.bfloat16))[number % 2], *row)
        for number, row in enumerate([*CACHES, CACHES[0]])
    ],
)
def test_cache_bytes_are_those_of_the_model(
    tmp_path: Path, family: str, profile: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    plan = planned(tmp_path, family, profile, tuple(range(LAYERS)), dtype, **changes)
    model = tiny_student(family, profile, **changes)
    cast(model, dtype)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for _ in range(2):
            model(torch.ones(1, 60, dtype=torch.int64), past_key_values=cache, use_cache=True)
    for layer, kept in zip(plan.layers, cache.layers, strict=True):
        parts = kept.parts.values() if isinstance(kept, MixedCacheLayer) else [kept]
        assert layer.state_bytes == sum(tensor.nbytes for part in parts for tensor in part.state.values())
        assert layer.cache_bytes(10) == layer.cache_bytes(10**6) == layer.state_bytes
    assert cache_bytes(cache) == plan.cache_bytes[0]["converted"]


PACKED: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 4, {"window": 40}),
    ("gemma3_text", 8, {"mixer": "window", "window": 40}),
    ("qwen3", 4, {"mixer": "mixed_heads", "heads": ["softmax", "linear"]}),
]


@pytest.mark.parametrize(("family", "bits", "changes"), PACKED)
@torch.no_grad()
def test_packed_cache_bytes_are_those_of_the_model(
    tmp_path: Path, family: str, changes: dict[str, Any], bits: int
) -> None:
    plan = planned(tmp_path, family, "faithful", HYBRID, cache_bits=bits, **changes)
    model = set_cache_bits(tiny_student(family, "faithful", HYBRID, **changes), bits)
    for tokens in (3, 32, 33, 150):
        cache = DynamicCache(config=model.config)
        model(torch.ones(1, tokens, dtype=torch.int64), past_key_values=cache, use_cache=True)
        assert cache_bytes(cache) == sum(layer.cache_bytes(tokens) for layer in plan.layers)
    assert plan.to_json()["cache_bits"] == bits
    console = Console(record=True, width=160)
    print_plan(plan, console)
    assert f"keys and values in {bits} bits" in console.export_text()


@pytest.mark.parametrize(("positions", "contexts"), [(128, (128,)), (8192, (2048, 4096, 8192)), (200_000, CONTEXTS)])
def test_hybrid_cache_adds_both_kinds(tmp_path: Path, positions: int, contexts: tuple[int, ...]) -> None:
    """At lengths up to the teacher's positions."""
    plan = planned(tmp_path, "llama", "faithful", HYBRID, positions=positions)
    state, kv = plan.layers[0].state_bytes, plan.layers[1].kv_bytes_per_token
    for row, context in zip(plan.cache_bytes, contexts, strict=True):
        assert row == {"context": context, "teacher": 4 * kv * context, "converted": 2 * state + 2 * kv * context}


def test_windows_by_layer() -> None:
    gemma, mistral, llama = (teacher_config(family) for family in ("gemma2", "mistral", "llama"))
    assert [sliding_window(gemma, i) for i in range(LAYERS)] == [8, None, 8, None]
    assert sliding_window(mistral, 1) == 8
    assert sliding_window(llama, 1) is None


def test_plan_is_printable_and_json(tmp_path: Path) -> None:
    plan = planned(tmp_path, "gemma2", "qwen3_5", HYBRID)
    value = json.loads(json.dumps(plan.to_json()))
    assert value["converted_layers"] == list(HYBRID)
    assert value["bytes"] == plan.layout.nbytes
    assert value["peak_memory_bytes"] > value["bytes"]
    console = Console(record=True, width=160)
    print_plan(plan, console)
    text = console.export_text()
    assert "0, 2" in text
    assert "1, 3" in text
    assert "131,072" in text
    assert "stays softmax" in text


def test_plan_fits_a_narrow_terminal(tmp_path: Path) -> None:
    console = Console(record=True, width=80)
    print_plan(planned(tmp_path, "llama", "faithful", HYBRID), console)
    text = console.export_text()
    assert "…" not in text
    assert "created" in text
    assert "dropped" not in text  # 0 in every layer


def test_short_forms() -> None:
    assert index_ranges([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"
    assert [size(n) for n in (0, 999, 1500, 2_000_000, 10**9)] == ["0 B", "999 B", "1.5 kB", "2.0 MB", "1.0 GB"]
    assert [count(n) for n in (7, 1500, 134_515_008, 8_030_000_000)] == ["7", "1.50k", "134.52M", "8.03B"]
