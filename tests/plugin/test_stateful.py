"""Calls with a cache or a mask that does not fit: the tokens are right, or the call is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StaticCache

from deltanet_hf.errors import UserError
from deltanet_hf.fast.decoder import fast_attention
from deltanet_hf.mixers.cache.argument import NAMES
from deltanet_hf.models.cache_bits import set_cache_bits
from deltanet_hf.models.restrict import restrict_heads, restrict_to_window
from support.tiny_models import mixed_table, tiny_mixture, tiny_student, tiny_table, tiny_teacher

LENGTH, NEW = 8, 4
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
MODELS = {
    "pure": lambda: tiny_student("llama"),
    "heads": lambda: tiny_mixture("llama", mixed_table("linear", "softmax")),
    "free heads": lambda: restrict_heads(tiny_teacher("llama"), {1: [0]}, 4, 1),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(3, 97, (2, LENGTH), generator=torch.Generator().manual_seed(4))


def generated(model: Any, ids: torch.Tensor | None, new: int = NEW, **options: Any) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=new, **{**GREEDY, **options})  # type: ignore[no-any-return]


def filled(model: Any, ids: torch.Tensor, cache: Any = None) -> Any:
    cache = DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny_student("llama"),
        lambda: tiny_student("llama", mixer="window"),
        lambda: tiny_student("llama", mixer="alibi"),
        lambda: set_cache_bits(tiny_mixture("llama", tiny_table(layers=())), 4),
        lambda: set_cache_bits(restrict_heads(tiny_teacher("llama"), {0: [0]}, 40, 1), 4),
    ],
    ids=["mixer", "window", "alibi", "packed", "mixed heads"],
)
@torch.no_grad()
def test_a_layer_takes_its_cache_by_either_name(make: Any) -> None:
    model = make()
    x = torch.randn(2, LENGTH, 32)
    angles = model.model.rotary_emb(x, torch.arange(LENGTH)[None])
    for layer in (model.model.layers[0].self_attn, fast_attention(model.model.layers[0].self_attn, False)):
        for name in NAMES:
            cache = DynamicCache(config=model.config)
            layer(hidden_states=x, position_embeddings=angles, attention_mask=None, **{name: cache})
            assert cache.get_seq_length() == LENGTH


def test_a_cache_continues_the_tokens_that_it_holds(model: PreTrainedModel, ids: torch.Tensor) -> None:
    wanted = generated(model, ids, 2 * NEW)
    found = generated(model, ids, return_dict_in_generate=True)
    assert torch.equal(generated(model, found.sequences, past_key_values=found.past_key_values), wanted)
    assert torch.equal(generated(model, ids, 2 * NEW, past_key_values=filled(model, ids[:, :5])), wanted)
    new = generated(model, ids[:, 5:], past_key_values=filled(model, ids[:, :5]), attention_mask=torch.ones_like(ids))
    assert torch.equal(new[:, 3:], wanted[:, LENGTH : LENGTH + NEW])
    refused, chunks = None, None
    try:
        chunks = generated(model, ids, prefill_chunk_size=2, past_key_values=filled(model, ids[:, :5]))
    except ValueError as error:  # transformers 5.17 gives the chunks of the whole prompt to the cache, with short masks
        refused = str(error)
    assert (chunks is None) == (refused is not None)
    assert chunks is None or torch.equal(chunks, wanted[:, : LENGTH + NEW])
    assert refused is None or "attention_mask: got shape [2, 2], expected [2, 7]" in refused


@pytest.mark.parametrize("kinds", [("linear", "window"), ("linear", "softmax")])
def test_a_cache_of_other_bits_is_refused(kinds: tuple[str, ...], ids: torch.Tensor) -> None:
    """Of 4 bits, keys in 8 would be read in another order; in 16 they have other tensors."""
    model = tiny_mixture("llama", mixed_table(*kinds, sinks=4))
    for bits, other in ((4, 8), (4, 16), (16, 4)):
        cache = filled(set_cache_bits(model, bits), ids)
        with pytest.raises(ValueError, match=f"^cache: was filled with keys and values in {bits} bits, and .* {other}"):
            filled(set_cache_bits(model, other), ids, copy.deepcopy(cache))
        assert filled(set_cache_bits(model, bits), ids, cache).get_seq_length() == 2 * LENGTH


def test_a_cache_that_does_not_fit_is_refused(model: PreTrainedModel, ids: torch.Tensor) -> None:
    longer = generated(model, ids, return_dict_in_generate=True).past_key_values
    for cache in (longer, filled(model, ids), filled(model, ids, StaticCache(model.config, max_cache_len=20))):
        with pytest.raises(ValueError, match=r"cache: holds .* cannot go back"):
            generated(model, ids, past_key_values=copy.deepcopy(cache))
    with pytest.raises(ValueError, match="cannot go back"):
        generated(model, None, inputs_embeds=model.get_input_embeddings()(ids), past_key_values=copy.deepcopy(longer))
    other = torch.cat([ids, ids], dim=1)
    with pytest.raises(ValueError, match="are not those that this cache was returned with"):
        generated(model, other, past_key_values=copy.deepcopy(longer))
    with pytest.raises(ValueError, match="attention_mask: has 10 columns"):
        generated(model, ids[:, :4], past_key_values=filled(model, ids), attention_mask=torch.ones(2, 10).long())
    with pytest.raises(ValueError, match="use_cache"):
        generated(model, ids, use_cache=False, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="cache: holds 2 sequences and the inputs have 1"):
        generated(model, ids[:1], past_key_values=filled(model, ids[:, :5]))
    with pytest.raises(ValueError, match="cache: holds 1 sequences and the inputs have 3"):
        generated(model, ids[:1], num_beams=3, past_key_values=filled(model, ids[:1, :5]))


def test_continuous_batching_is_refused(model: Any, ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="generate_batch: continuous batching"):
        model.generate_batch(ids.tolist(), generation_config=GenerationConfig(max_new_tokens=NEW))
    with pytest.raises(ValueError, match="generate_batch: continuous batching"):
        generated(model, ids, cache_implementation="paged")


def test_a_mask_for_other_tokens_is_refused(model: Any, ids: torch.Tensor) -> None:
    for shape in ((2, 5), (1, LENGTH), (3, LENGTH), (2, LENGTH, LENGTH), (LENGTH,)):
        with pytest.raises(ValueError, match=r"attention_mask: got shape .* expected \[2, 8\]"):
            model(ids, attention_mask=torch.ones(shape, dtype=torch.long))
    with pytest.raises(ValueError, match=r"expected \[2, 16\]"):  # of the new tokens alone
        model(ids, past_key_values=filled(model, ids), attention_mask=torch.ones_like(ids))


@pytest.mark.parametrize("mixer", ["gated_deltanet", "deltanet", "window", "fox", None])
def test_the_cache_of_another_model_is_refused(ids: torch.Tensor, mixer: str | None) -> None:
    student = tiny_student("llama", layers=(1, 2)) if mixer == "gated_deltanet" else tiny_student("llama")
    other = tiny_teacher("llama") if mixer is None else tiny_student("llama", mixer=mixer)
    with pytest.raises((ValueError, TypeError), match=r"cache: .* pass an empty"):
        student(ids, past_key_values=filled(other, ids))


@pytest.mark.parametrize("make", [tiny_teacher, tiny_student], ids=["teacher", "student"])
def test_windows_that_a_folder_does_not_have_are_not_saved(make: Any, tmp_path: Path) -> None:
    """Before: random attention where heads were restricted, the plain teacher where layers were."""
    layers = {} if make is tiny_teacher else {"layers": (0, 2)}
    restricted = [restrict_to_window(make("llama", **layers), 4, 1)]
    restricted += [restrict_heads(make("llama"), {1: [0]}, 4, 1)] if make is tiny_teacher else []
    for model in restricted:
        for save in (model.save_pretrained, get_peft_model(model, LoraConfig(r=1)).get_base_model().save_pretrained):
            with pytest.raises(UserError, match=r"^save_pretrained: .* not have the windows .* convert --mixer window"):
                save(tmp_path)
    assert not any(tmp_path.iterdir())


def test_what_is_no_cache_is_refused(ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="cache: got tuple, expected a Cache"):
        tiny_student("llama")(ids, past_key_values=((ids, ids),))
    hybrid = tiny_student("llama", layers=(0, 2))
    half = filled(hybrid, ids)
    half.layers[0].reset()
    with pytest.raises(ValueError, match="its layers hold 0 to 8 tokens"):
        hybrid(ids, past_key_values=half)


def test_a_cache_that_was_reset_takes_other_tokens(ids: torch.Tensor) -> None:
    model = tiny_student("llama")
    cache = generated(model, ids, return_dict_in_generate=True).past_key_values
    cache.reset()
    other = ids.flip(1)
    assert torch.equal(
        generated(model, other, past_key_values=filled(model, other[:, :5], cache)), generated(model, other)
    )


@pytest.mark.parametrize("layers", [None, (1,)])
def test_prefix_tuning_is_refused(ids: torch.Tensor, layers: tuple[int, ...] | None) -> None:
    peft = pytest.importorskip("peft")
    model = tiny_mixture("llama", tiny_table(layers=layers))
    tuned = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    for call in (tuned, lambda input_ids: tuned.generate(input_ids=input_ids, max_new_tokens=2, **GREEDY)):
        with pytest.raises(ValueError, match=r"prefix tuning.* train LoRA adapters instead"):
            call(input_ids=ids)


def test_a_cache_of_keys_and_values_for_other_rows_is_refused() -> None:
    """Models of which no layer has a state, too."""
    model, ids = tiny_student("llama", mixer="fox"), torch.arange(3, 13).view(1, 10)
    with pytest.raises(ValueError, match="cache: holds 1 sequences and the inputs have 3"):
        model.generate(ids, past_key_values=filled(model, ids[:, :5]), num_beams=3, max_new_tokens=2)
