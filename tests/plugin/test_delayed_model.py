"""Models with a state of what has left the window, long enough for groups to leave: what they generate by their caches
has the logits of reading the same tokens at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from deltanet_hf import LayerTable
from deltanet_hf.models.assisted import place_layers
from deltanet_hf.models.cache_bits import set_cache_bits
from support.tiny_models import mixed_heads, tiny_mixture

pytestmark = pytest.mark.usefixtures("float64")

IDS = torch.randint(3, 97, (2, 140), generator=torch.Generator().manual_seed(4))
PROMPT, NEW, PADDED = 60, 40, 9  # the groups of the tokens 64 and 96 begin within the new ones
OPTIONS: dict[str, Any] = {
    "max_new_tokens": NEW,
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 0,
    "disable_compile": True,
    "return_dict_in_generate": True,
    "output_logits": True,
}


def student(window: int, bits: int) -> PreTrainedModel:
    table = LayerTable.preset(2, "gated_deltanet+window", window=window, state_dtype="float32")
    return set_cache_bits(tiny_mixture("llama", table), bits).double()


def heads(window: int, bits: int) -> PreTrainedModel:
    preset = LayerTable.preset(1, "gated_deltanet+window", window=window, state_dtype="float32")
    linear = preset.only_kind.settings.to_dict()
    kinds = {f"{other} too": mixed_heads("linear", other, linear=linear) for other in ("softmax", "window")}
    return set_cache_bits(tiny_mixture("llama", LayerTable(kinds, tuple(kinds))), bits).double()


MODELS = {"4 bits": lambda: student(33, 4), "16 bits": lambda: student(65, 16), "heads in 8 bits": lambda: heads(33, 8)}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return MODELS[request.param]()


def mask(length: int) -> torch.Tensor:
    """Padding before the first row."""
    made = torch.ones(2, length, dtype=torch.long)
    made[0, :PADDED] = 0
    return made


def close(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)


SAMPLED = {"do_sample": True, "top_k": 20}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("4 bits", {}),
        ("4 bits", {**SAMPLED, "cache_implementation": "static"}),
        ("16 bits", {**SAMPLED, "prefill_chunk_size": 25}),
        ("heads in 8 bits", SAMPLED),
        ("heads in 8 bits", {"prefill_chunk_size": 7}),
    ],
    indirect=["model"],
)
@torch.no_grad()
def test_a_padded_batch_is_read_again(model: PreTrainedModel, options: dict[str, Any]) -> None:
    """Each row as alone, without a cache."""
    torch.manual_seed(0)
    found = model.generate(IDS[:, :PROMPT], attention_mask=mask(PROMPT), **{**OPTIONS, **options})
    rows = found.sequences[:1, PADDED:], found.sequences[1:]
    close(torch.stack(found.logits, 1), torch.cat([model(row).logits[:, -NEW - 1 : -1] for row in rows]))


@torch.no_grad()
def test_beams(model: PreTrainedModel) -> None:
    options = {**OPTIONS, "num_beams": 3, "max_new_tokens": 12, "attention_mask": mask(90), "output_scores": True}
    beams = model.generate(IDS[:, :90], **options)
    wanted = model.generate(IDS[:, :90], use_cache=False, **options)
    assert beams.sequences.tolist() == wanted.sequences.tolist()
    close(beams.sequences_scores, wanted.sequences_scores)


@pytest.mark.parametrize("how", ["assistant", "prompt lookup"])
@torch.no_grad()
def test_drafts(model: PreTrainedModel, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are taken back over the beginning of a group."""
    prompt, crop, over = IDS[:1, :PROMPT], DynamicCache.crop, []

    def watched(cache: DynamicCache, tokens: int) -> None:
        before = int(cache.get_seq_length())
        over.append((before - 1) // 32 > (before + tokens - 1) // 32)
        crop(cache, tokens)

    options: dict[str, Any] = {"prompt_lookup_num_tokens": 6}
    if how == "assistant":
        assistant = copy.deepcopy(model)
        assistant.lm_head.weight.add_(torch.randn(97, 32, generator=torch.Generator().manual_seed(0)), alpha=0.1)
        assistant.generation_config.num_assistant_tokens = 6
        assistant.generation_config.assistant_confidence_threshold = 0.0
        options = {"assistant_model": assistant}
    else:
        prompt = IDS[:1, : PROMPT // 3].repeat(1, 3)
    monkeypatch.setattr(DynamicCache, "crop", watched)
    found = model.generate(prompt, **OPTIONS, **options)
    close(torch.stack(found.logits, 1), model(found.sequences).logits[:, -NEW - 1 : -1])
    assert any(over)


@torch.no_grad()
def test_tokens_taken_back_over_the_beginning_of_a_group(model: PreTrainedModel) -> None:
    wanted = model(IDS).logits
    for end, kept in ((97, 96), (98, 96), (100, 95), (130, 94)):
        cache = DynamicCache(config=model.config)
        place_layers(model, cache)
        cache.activate_past_recording()
        for part in IDS[:, :end].split([90, *[1] * 5, end - 95], 1):
            model(part, past_key_values=cache)
        cache.crop(kept - end)
        close(model(IDS[:, kept:], past_key_values=cache).logits, wanted[:, kept:])


@pytest.mark.parametrize("length", [95, 96, 97])
@torch.no_grad()
def test_caches_of_other_batches_go_on(model: PreTrainedModel, length: int) -> None:
    cache = DynamicCache(config=model.config)
    model(IDS[:, :length], past_key_values=cache)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 1]))
    cache.batch_select_indices(torch.tensor([2, 0]))
    rows = IDS[[0, 1], : length + 3]
    steps = [model(step, past_key_values=cache).logits for step in rows[:, length:].split(1, 1)]
    close(torch.cat(steps, 1), model(rows).logits[:, length:])
