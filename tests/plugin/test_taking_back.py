"""Tokens taken back from states: `crop`, assisted generation, prompt lookup."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from deltanet_hf.mixers.cache import history
from deltanet_hf.mixers.cache.state import MixerCacheLayer
from deltanet_hf.models.assisted import place_layers
from deltanet_hf.models.restrict import restrict_to_window
from support.registry import IN_FULL, made, rows
from support.tiny_models import HYBRID, tiny_student, tiny_teacher
from support.transformers_version import several_recorded_calls

IDS = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(4))
GREEDY: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None}


def recording(model: PreTrainedModel) -> DynamicCache:
    """An empty cache that records its past from the first call on."""
    cache = DynamicCache(config=model.config)
    place_layers(model, cache)
    cache.activate_past_recording()
    return cache


def read(model: PreTrainedModel, cache: DynamicCache, mask: torch.Tensor, *parts: slice) -> torch.Tensor:
    """Logits of the last of the calls that read these parts of IDS."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for part in parts:
        seen, at = mask[:, : part.stop], positions[:, part]
        output = model(IDS[:, part], attention_mask=seen, position_ids=at, past_key_values=cache, use_cache=True)
    return output.logits


def masked(side: str) -> torch.Tensor:
    """The first row's prompt of 8 tokens has padding of 3 tokens on one side."""
    mask = torch.ones_like(IDS)
    mask[0, slice(0, 3) if side == "left" else slice(5, 8)] = 0
    return mask


@torch.no_grad()
@pytest.mark.parametrize("name", [*rows(), "sliding", "gated_deltanet+window"])
def test_a_cropped_cache_goes_on_as_one_that_never_read_the_tokens(name: str) -> None:
    model = made(name)
    for side in ("left", "right") if name in IN_FULL else ("left",):
        mask = masked(side)
        cache, plain = recording(model), DynamicCache(config=model.config)
        read(model, cache, mask, slice(0, 8), slice(8, 9), slice(9, 13))
        cache.crop(-2)  # within the last call
        assert cache.get_seq_length() == 11
        if name in IN_FULL:
            read(model, cache, mask, slice(11, 12), slice(12, 15))
            cache.crop(-4)  # all of the last two calls
            cache.crop(0)
        found = read(model, cache, mask, slice(11, 12))
        wanted = read(model, plain, mask, slice(0, 11), slice(11, 12))
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("gated_deltanet", torch.inference_mode),
        ("gated_deltanet+window", torch.no_grad),
        ("window", torch.inference_mode),
        ("path", torch.no_grad),
    ],
)
def test_what_is_read_again_is_read_in_the_mode_of_the_call(name: str, mode: Any) -> None:
    """Whoever crops may have left it: a state would take a graph of gradients along, or could not be saved for one."""
    model = made(name)
    cache = recording(model)
    with mode():
        model(IDS[:, :9], past_key_values=cache, use_cache=True)
    cache.crop(-3)
    assert not any(tensor.requires_grad for layer in cache.layers for tensor in getattr(layer, "state", {}).values())
    with mode():
        found = model(IDS[:, 6:], past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(found, model(IDS).logits[:, 6:], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", [*rows(all_by_default=False), pytest.param("sliding", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["prompt lookup", pytest.param("assistant", marks=pytest.mark.slow)])
def test_assisted_greedy_equals_plain_greedy(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, taken_back = made(name), []
    crop = DynamicCache.crop

    def counted(self: DynamicCache, tokens: int) -> None:
        taken_back.append(tokens)
        crop(self, tokens)

    monkeypatch.setattr(DynamicCache, "crop", counted)
    prompt = IDS[:1, :9].repeat(1, 2)
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 4}
    if how == "assistant":
        assistant = copy.deepcopy(model)
        with torch.no_grad():
            assistant.lm_head.weight.add_(0.5 * torch.randn(97, 32, generator=torch.Generator().manual_seed(0)))
        assistant.generation_config.num_assistant_tokens = 4
        assistant.generation_config.assistant_confidence_threshold = 0.0
        options = {"assistant_model": assistant}
    plain = model.generate(prompt, **GREEDY)
    assert model.generate(prompt, **options, **GREEDY).tolist() == plain.tolist()
    assert min(taken_back) < 0


def test_a_long_padded_prompt_and_an_early_end() -> None:
    """A prompt of which only the end is recorded; candidates behind the end-of-text token are taken back."""
    model = made("gated_deltanet+window")
    prompt = IDS[:1].repeat(1, 5)
    assert prompt.shape[1] > history.MOST_TAKEN_BACK
    mask = torch.ones_like(prompt)
    mask[0, :7] = 0
    end = int(model.generate(prompt, attention_mask=mask, **GREEDY)[0, -6])
    options = {**GREEDY, "eos_token_id": end, "return_dict_in_generate": True}
    plain = model.generate(prompt, attention_mask=mask, **options)
    found = model.generate(prompt, attention_mask=mask, prompt_lookup_num_tokens=5, **options)
    assert found.sequences.tolist() == plain.sequences.tolist()
    assert found.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()


def test_the_past_that_is_recorded_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_TAKEN_BACK", 6)
    model = tiny_student("llama", mixer="linear")
    cache = recording(model)
    with torch.no_grad():
        model(IDS[:1], past_key_values=cache, use_cache=True)
        with pytest.raises(ValueError, match="cannot take back 7 tokens, a recurrent state holds"):
            cache.crop(-7)
        assert cache.get_seq_length() == 20
        for _ in range(9):
            model(IDS[:1, :1], past_key_values=cache, use_cache=True)
    layer = cache.layers[0]
    assert isinstance(layer, MixerCacheLayer)
    assert len(layer.history.calls) == 6
    cache.crop(-6)
    assert not layer.history.calls
    assert layer.get_seq_length() == 23


def test_more_candidates_than_can_be_taken_back_are_refused() -> None:
    model, prompt = made("mixed_heads"), IDS[:1].repeat(1, 5)
    with pytest.raises(ValueError, match=r"cannot take back .* the last 64 tokens: more candidates \(prompt_lookup_"):
        model.generate(prompt, prompt_lookup_num_tokens=70, **{**GREEDY, "max_new_tokens": 90})


@torch.no_grad()
@pytest.mark.parametrize("name", ["gated_deltanet+window", "mixed_heads", "path", "window"])
def test_a_copy_of_a_cache_takes_back_its_own_tokens(name: str) -> None:
    model = made(name)
    cache, mask = recording(model), torch.ones_like(IDS)
    read(model, cache, mask, slice(0, 8), slice(8, 13))
    copied = copy.deepcopy(cache)
    copied.crop(-3)
    wanted = read(model, DynamicCache(config=model.config), mask, slice(0, 20))
    for held, seen in ((copied, 10), (cache, 13)):
        assert held.get_seq_length() == seen
        found = read(model, held, mask, slice(seen, 20))
        torch.testing.assert_close(found, wanted[:, seen:], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("change", ["reorder_cache", "batch_select_indices"])
def test_another_batch_has_no_past(change: str) -> None:
    model = made("mixed_heads")
    cache = recording(model)
    read(model, cache, torch.ones_like(IDS), slice(0, 5))
    getattr(cache, change)(torch.tensor([1, 0]))
    with pytest.raises(ValueError, match="crop: cannot take back 2 tokens"):
        cache.crop(-2)


def test_a_cache_goes_on_without_recording() -> None:
    model = made("mixed_heads")
    options = {**GREEDY, "max_new_tokens": 4, "return_dict_in_generate": True}
    first = model.generate(IDS[:1], prompt_lookup_num_tokens=3, **options)
    again = model.generate(first.sequences, past_key_values=first.past_key_values, **options)
    assert not any(layer.record_past for layer in again.past_key_values.layers if hasattr(layer, "record_past"))
    assert again.sequences.tolist() == model.generate(IDS[:1], **{**options, "max_new_tokens": 8}).sequences.tolist()


@torch.no_grad()
@pytest.mark.parametrize("read", [0, pytest.param(12, marks=several_recorded_calls)])
def test_generation_goes_on_with_a_sliding_cache_that_recorded_several_calls(read: int) -> None:
    model = tiny_student("mistral", layers=HYBRID)
    cache = recording(model)
    for ids in IDS[:, :read].split(3, dim=1) if read else ():
        model(ids, past_key_values=cache, use_cache=True)
    found = model.generate(IDS, past_key_values=cache, **GREEDY)
    assert found.tolist() == model.generate(IDS, **GREEDY).tolist()


def test_a_cache_that_holds_tokens_is_refused() -> None:
    """In assisted generation transformers reads the whole prompt, whatever the cache holds."""
    model = made("gated_deltanet")
    result = model.generate(IDS[:1], return_dict_in_generate=True, **GREEDY)
    with pytest.raises(ValueError, match="cache: holds 33 tokens, but assisted generation reads"):
        model.generate(result.sequences, past_key_values=result.past_key_values, prompt_lookup_num_tokens=3, **GREEDY)
    assert result.past_key_values.get_seq_length() == 33


@torch.no_grad()
@pytest.mark.parametrize("name", ["gated_deltanet+window", "mixed_heads"])
def test_tokens_that_were_not_recorded_are_not_taken_back(name: str) -> None:
    model = made(name)
    cache = recording(model)
    model(IDS[:, :5], past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        layer.record_past = False
    model(IDS[:, 5:10], past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="no history"):
        cache.crop(-2)


def test_layers_of_the_model_itself_assist() -> None:
    """The assistant keeps a cache of its own and goes back over several of its calls."""
    model = made("mixed_heads")
    options = {**GREEDY, "max_new_tokens": 8}
    plain = model.generate(IDS[:1], **options)
    assert model.generate(IDS[:1], assistant_early_exit=2, **options).tolist() == plain.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("name", rows())
def test_on_a_gpu_assisted_greedy_equals_plain_greedy(name: str) -> None:
    model, prompt = made(name).cuda(), IDS[:1, :9].repeat(1, 9).cuda()
    plain = model.generate(prompt, **GREEDY)
    assert model.generate(prompt, prompt_lookup_num_tokens=4, **GREEDY).tolist() == plain.tolist()


def test_a_restricted_teacher_refuses_assistance() -> None:
    with pytest.raises(ValueError, match="stateful"):
        restrict_to_window(tiny_teacher("llama")).generate(IDS[:1], prompt_lookup_num_tokens=2, max_new_tokens=3)
