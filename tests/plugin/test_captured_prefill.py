"""A captured prompt gives the logits and the cache of separate launches; on a CPU, by operations run again.

`support/replayed_step.py` stands for the CUDA graph. `test_graph_decoding_gpu.py` has the same with real graphs.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from deltanet_hf.decoding import captured_graphs, forget_graphs, serve
from deltanet_hf.decoding.captured_graphs import read_prompt
from deltanet_hf.mixers.cache.argument import CACHE
from deltanet_hf.models.cache_bits import set_cache_bits
from support.cache_tensors import cache_tensors
from support.replayed_step import EmulatedCapture
from support.tiny_models import (
    mixed_mixture_table,
    mixed_table,
    mixture_table,
    tiny_mixture,
    tiny_student,
    tiny_teacher,
)

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "softmax in 4 bits": lambda: serve(set_cache_bits(tiny_teacher("llama"), 4)),
    "window": lambda: tiny_student("llama", mixer="window", window=40, sinks=2),
    "heads in 4 bits": lambda: set_cache_bits(tiny_mixture("llama", mixed_table("softmax", "window", window=40)), 4),
    "heads of all kinds": lambda: tiny_mixture("llama", mixed_mixture_table()),
    "states and windows": lambda: tiny_student("llama", mixer="gated_deltanet+window", window=33, sinks=2),
    "states and windows in 4 bits": lambda: set_cache_bits(
        tiny_student("llama", mixer="gated_deltanet+window", window=33), 4
    ),
    "states and windows by their own operations in 4 bits": lambda: set_cache_bits(
        tiny_student("llama", mixer="gated_deltanet+window", window=33, k_offset=True), 4
    ),
    "softmax beside states in 4 bits": lambda: set_cache_bits(
        tiny_mixture("llama", replace(mixed_mixture_table(), layers=("far",) * 4)), 4
    ),
    "convolutions": lambda: tiny_student("llama", profile="qwen3_5"),
    "another rule": lambda: tiny_student("llama", mixer="titans"),
    "norms of q and k": lambda: tiny_mixture("qwen3", mixture_table()),
    "norms of q and k, heads in 4 bits": lambda: set_cache_bits(
        tiny_mixture("qwen3", mixed_table("softmax", "window", window=40)), 4
    ),
}


@pytest.fixture(autouse=True)
def lengths(capture: EmulatedCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_graphs, "LENGTHS", (64, 96))


def prompt(length: int, rows: int = 2) -> Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(length))


def inputs(model: PreTrainedModel, ids: Tensor, **changes: Any) -> dict[str, Any]:
    cache = DynamicCache(config=model.config)
    return {"input_ids": ids, CACHE: cache, "use_cache": True, "logits_to_keep": 1, **changes}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_as_by_separate_launches(name: str, capture: EmulatedCapture) -> None:
    """Around the captured lengths; without padding, the cache bit for bit."""
    model = MODELS[name]().double()
    for length in (96, 65, 64, 2, 32, 96):
        plain, captured = inputs(model, prompt(length)), inputs(model, prompt(length))
        wanted, found = model(**plain).logits, read_prompt(model, captured)
        torch.testing.assert_close(found.logits, wanted, rtol=1e-4, atol=1e-4)
        exact = length in (64, 96)
        caches = plain[CACHE], captured[CACHE]
        assert caches[0].get_seq_length() == caches[1].get_seq_length() == length
        for (label, one), (other_label, other) in zip(*map(cache_tensors, caches), strict=True):
            assert label == other_label
            torch.testing.assert_close(one, other, rtol=0 if exact else 2**-13, atol=0 if exact else 1e-4)
            assert one.is_contiguous()
        goes_on = [model(prompt(3), past_key_values=cache).logits for cache in caches]
        torch.testing.assert_close(*goes_on, rtol=1e-3, atol=1e-3)
    assert (capture.captured_prefills, capture.replayed_prefills) == (2, 6)


@torch.inference_mode()
def test_a_cache_is_no_part_of_the_graph() -> None:
    model = MODELS["heads of all kinds"]()
    calls = [inputs(model, prompt(length)) for length in (50, 40, 64)]
    for call in calls[:2]:
        read_prompt(model, call)
    before = [x.clone() for _, x in cache_tensors(calls[1][CACHE])]
    read_prompt(model, calls[2])
    assert all(map(torch.equal, before, (x for _, x in cache_tensors(calls[1][CACHE]))))


def test_generate(capture: EmulatedCapture) -> None:
    model = MODELS["states and windows"]()
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for length in (40, 50, 90):
        wanted = model.generate(prompt(length), disable_compile=True, **options)
        assert model.generate(prompt(length), **options).tolist() == wanted.tolist()
    assert (capture.captured_prefills, capture.replayed_prefills) == (2, 3)
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[1, :4] = 0
    model.generate(prompt(50), attention_mask=mask, **options)  # padding
    model.generate(prompt(50), num_beams=2, **options)
    assert (capture.captured_prefills, capture.replayed_prefills) == (2, 3)
    model.generate(prompt(60), prefill_chunk_size=50, **options)  # its first part
    assert (capture.captured_prefills, capture.replayed_prefills) == (2, 4)
    cache = DynamicCache(config=model.config)
    said = model.generate(prompt(50, 1), past_key_values=cache, **options)
    longer = torch.cat([said, prompt(3, 1)], dim=1)
    assert model.generate(longer, past_key_values=cache, **options).tolist() == (
        model.generate(longer, disable_compile=True, **options).tolist()
    )


def test_a_cache_of_other_bits_is_refused(capture: EmulatedCapture) -> None:
    model = MODELS["states and windows in 4 bits"]()
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for _ in range(2):  # the second time, everything is a graph
        found = model.generate(prompt(50), return_dict_in_generate=True, **options)
    assert capture.replayed_prefills == 2
    longer = torch.cat([found.sequences, prompt(3)], dim=1)
    with pytest.raises(ValueError, match=r"^cache: was filled with keys and values in 4 bits"):
        set_cache_bits(model, 8).generate(longer, past_key_values=found[CACHE], **options)


@torch.inference_mode()
def test_what_is_not_captured(capture: EmulatedCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["states and windows"]()
    ids = prompt(50)

    def refused(model: PreTrainedModel = model, ids: Tensor = ids, **changes: Any) -> bool:
        return read_prompt(model, inputs(model, ids, **changes)) is None

    filled = DynamicCache(config=model.config)
    model(ids, past_key_values=filled)
    assert refused(**{CACHE: filled})
    assert refused(**{CACHE: None})
    assert refused(**{CACHE: DynamicCache()})
    assert refused(logits_to_keep=0)
    assert refused(ids=prompt(97))
    assert refused(ids=prompt(1))
    assert refused(position_ids=torch.arange(1, 51)[None])
    assert refused(attention_mask=torch.arange(50).expand(2, -1) > 3)
    assert refused(output_hidden_states=True)
    assert refused(tiny_mixture("mistral", mixture_table()))  # its window is shorter than the shortest captured length
    assert refused(tiny_student("llama", mixer="alibi"))
    assert refused(tiny_mixture("gemma2", mixture_table()))  # SDPA does not cap its scores
    assert refused(tiny_student("llama", mixer="mesa"))  # reads its residuals on CPUs
    with monkeypatch.context() as patch:
        patch.setattr(captured_graphs, "MOST_PRODUCTS", 0)
        assert refused()
    assert capture.captured_prefills == 0
    assert not refused(position_ids=torch.arange(50)[None], attention_mask=torch.ones(2, 50))


@torch.inference_mode()
def test_which_graphs_are_kept(capture: EmulatedCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_graphs, "KEPT_PREFILLS", 2)
    model = MODELS["window"]()
    for rows, length in ((1, 50), (2, 50), (1, 60), (3, 50), (1, 50), (2, 50)):
        read_prompt(model, inputs(model, prompt(length, rows)))
    assert capture.captured_prefills == 4  # the last one for the second time
    before = read_prompt(model, inputs(model, prompt(50)))
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(model.model.layers[0].mlp.up_proj.weight * 0.5)
    after = read_prompt(model, inputs(model, prompt(50)))
    assert not torch.equal(before.logits, after.logits)
    forget_graphs(model)
    read_prompt(model, inputs(model, prompt(50)))
    assert capture.captured_prefills == 6
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
