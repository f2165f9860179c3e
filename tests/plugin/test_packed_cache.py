"""The packed cache of a model is its fake quantisation: decoding, padding, chunks, beams, taking back, bytes."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, QuantizedCache

from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.measures.speed import sequence_bytes
from deltanet_hf.fast import FastDecoder, fast_form
from deltanet_hf.fast.packed import FastPacked
from deltanet_hf.mixers.cache.cache_bytes import cache_bytes
from deltanet_hf.mixers.cache.mixed_cache import MixedCacheLayer
from deltanet_hf.mixers.cache.quantised_cache_spec import NAMES, QuantisedCacheSpec, held_bytes
from deltanet_hf.mixers.cache.quantised_kv_cache import QuantisedKVCache, fake_quantised
from deltanet_hf.mixers.cache.state import MixerCacheLayer
from deltanet_hf.models.assisted import place_layers
from deltanet_hf.models.cache_bits import add_key_order, cache_bits_of, set_cache_bits, stored_bytes
from deltanet_hf.models.layers import LayerTable
from deltanet_kernels import PackedKeyValues, packed_part
from deltanet_kernels.packed_cache.layout import GROUP, rounded_tokens, unpacked
from support.plain_form import plain_form
from support.read_in_parts import read_in_parts
from support.tiny_models import (
    HYBRID,
    mixed_mixture_table,
    mixed_table,
    randomise,
    tiny_mixture,
    tiny_qwen3_5,
    tiny_student,
    tiny_teacher,
)

LONG = torch.randint(3, 97, (2, 150), generator=torch.Generator().manual_seed(0))


def made(name: str, bits: int = 4) -> PreTrainedModel:
    models = {
        "teacher": lambda: tiny_teacher("llama"),
        "sliding": lambda: tiny_teacher("gemma3_text"),
        "capped": lambda: tiny_teacher("gemma2"),
        "capped beside states": lambda: tiny_student("gemma2", layers=(1,), window=40),
        "learned sinks": lambda: tiny_student("gpt_oss", layers=HYBRID, window=40),
        "hybrid": lambda: tiny_student("llama", layers=HYBRID, window=40),
        "window": lambda: tiny_student("llama", mixer="window", window=40),
        "heads": lambda: tiny_mixture("llama", mixed_mixture_table()),
        "whole and windows": lambda: tiny_mixture(
            "llama", mixed_table("softmax", "window").with_windows((40, 70, 33, 97))
        ),
        "norms of q and k": lambda: tiny_mixture(
            "qwen3", mixed_table("softmax", "window").with_windows((40, 70, 33, 97))
        ),
        "whole and states": lambda: tiny_mixture(
            "llama", replace(mixed_mixture_table(), layers=("far",) * 4).with_windows((40, 70, 33, 97))
        ),
        "qwen3_5": tiny_qwen3_5,
    }
    model: PreTrainedModel = set_cache_bits(models[name]().double(), bits)
    if bits == 4 and name not in ("teacher", "qwen3_5"):
        give_key_order(model)
    if name == "learned sinks":
        model.set_experts_implementation("eager")  # others have no float64
    return model


def give_key_order(model: Any) -> None:
    """Another order of channels for each head."""
    add_key_order(model)
    randomise(model, 0)
    if getattr(model.config, "deltanet", None) is not None:
        model.config.deltanet = model.config.deltanet | {"key_order": True}


# Shares of states are float32.
BOUND = dict.fromkeys(("hybrid", "capped beside states", "learned sinks", "heads", "whole and states"), 2e-6)
KINDS = [
    "teacher",
    "sliding",
    "capped",
    "learned sinks",
    "hybrid",
    "window",
    "heads",
    "whole and windows",
    "whole and states",
    "norms of q and k",
    "capped beside states",
]


@pytest.mark.parametrize(
    ("bits", "dtype", "size"),
    [(8, torch.bfloat16, 16), (8, torch.float32, 64), (4, torch.float32, 16), (4, torch.bfloat16, 64)],
)
def test_packed_numbers_are_those_of_fake_quantisation(bits: int, dtype: torch.dtype, size: int) -> None:
    k, v = (torch.randn(2, 101, 3, size).to(dtype) for _ in range(2))
    held = QuantisedKVCache(QuantisedCacheSpec(bits, None), {}, None)
    held.attend(k, k, v, 0.2, None)
    cache = PackedKeyValues(*(held.state[name] for name in NAMES))  # type: ignore[call-arg]
    keys, values = (x.transpose(1, 2) for x in unpacked(cache[:4], dtype))
    k, v = rounded_tokens(k), rounded_tokens(v)
    by_channel = k[:, :96].unflatten(1, (-1, GROUP)).transpose(2, -1)
    assert torch.equal(keys, fake_quantised(by_channel, bits).transpose(2, -1).flatten(1, 2))
    assert torch.equal(values, fake_quantised(v[:, :96].unflatten(-1, (-1, min(size, GROUP))), bits).flatten(-2))


def test_bytes_in_16_bits_are_those_of_the_tokens_that_are_seen() -> None:
    reaches: list[Any] = [(None, 0), (40, 4), (40, 4, 20)]
    found = [[held_bytes(2, 8, tokens, 16, torch.bfloat16, *reach) for reach in reaches] for tokens in (30, 100)]
    assert found == [[64 * 30, 64 * 30, 64 * 20], [64 * 100, 64 * 44, 64 * 20]]
    assert QuantisedCacheSpec.of(4, 40, 2, 40) == QuantisedCacheSpec(4, 40)  # the family's own has no sinks


CUTS = ([118, *[1] * 14, 18], [31, 1, 1, 1, 60, 56], [70, 1, 64, 15])


@pytest.mark.parametrize(
    ("name", "parts"),
    [*((name, CUTS[number % 3]) for number, name in enumerate(KINDS)), ("hybrid", CUTS[0]), ("hybrid", CUTS[2])],
    ids=str,
)
@torch.no_grad()
def test_however_a_text_is_cut_it_is_the_whole_forward(name: str, parts: list[int]) -> None:
    model = made(name)
    with plain_form():
        wanted = model(LONG, use_cache=False).logits
    for logits in (read_in_parts(model, LONG, parts), model(LONG, use_cache=False).logits):
        assert (logits - wanted).abs().max() < BOUND.get(name, 1e-9) * wanted.abs().max()
    set_cache_bits(model, 16)
    if name.startswith("capped"):  # SDPA of transformers 5.17 leaves the cap out
        model.set_attn_implementation("eager")
    plain = model(LONG, use_cache=False).logits
    assert (plain - wanted).abs().max() > 1e-4


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_padding_on_either_side_changes_nothing(name: str) -> None:
    """Rows of different lengths in one batch, a prompt in two parts and five tokens, against each row alone."""
    model, lengths = made(name), (110, 71)
    texts = [LONG[row, : length + 5] for row, length in enumerate(lengths)]
    for side in ("left", "right"):
        ids, mask = torch.zeros(2, 110, dtype=torch.long), torch.zeros(2, 110, dtype=torch.long)
        for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            at = slice(110 - length, 110) if side == "left" else slice(0, length)
            ids[row, at], mask[row, at] = text[:length], 1
        cache = DynamicCache(config=model.config)
        for start, end in ((0, 60), (60, 110)):
            positions = (mask.cumsum(1) - 1).clamp_min(0)[:, start:end]
            model(
                ids[:, start:end], attention_mask=mask[:, :end], position_ids=positions, past_key_values=cache,
                use_cache=True,
            )  # fmt: skip
        for step in range(5):
            new = torch.stack([text[length + step] for text, length in zip(texts, lengths, strict=True)])[:, None]
            mask = torch.cat([mask, torch.ones_like(new)], dim=1)
            positions = mask.sum(1, keepdim=True) - 1
            found = model(
                new, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            ).logits
        for row, text in enumerate(texts):
            wanted = model(text[None], use_cache=False).logits[0, -1]
            assert (found[row, -1] - wanted).abs().max() < BOUND.get(name, 1e-9) * wanted.abs().max()


@pytest.mark.parametrize(
    "name", ["teacher", "window", "whole and windows", "whole and states", "norms of q and k", "sliding"]
)
@torch.no_grad()
def test_the_fast_form_reads_a_prompt(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the plain form does, with a cache and without."""
    model, ids = made(name), LONG[:, :97]
    form = fast_form(model)
    assert isinstance(form, FastDecoder)
    with plain_form():
        cache = DynamicCache(config=model.config)
        wanted = model(ids, past_key_values=cache, use_cache=True).logits
    outputs: list[int] = []
    attended = FastPacked._output
    monkeypatch.setattr(FastPacked, "_output", lambda *call: outputs.append(1) or attended(*call))
    found_cache = DynamicCache(config=model.config)
    for options in ({"past_key_values": found_cache, "use_cache": True}, {"use_cache": False}):
        found = form(model, ids, **options).logits
        assert (found - wanted).abs().max() < BOUND.get(name, 1e-9) * wanted.abs().max()
    assert len(outputs) == 2 * len(model.model.layers)
    for found_layer, layer in zip(found_cache.layers, cache.layers, strict=True):
        assert found_layer.get_seq_length() == layer.get_seq_length() == 97
        for found_part, part in zip(parts_of(found_layer), parts_of(layer), strict=True):
            assert found_part.grows == part.grows
            for tensor, state in part.state.items():
                torch.testing.assert_close(found_part.state[tensor], state)


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_greedy_decoding_and_beams(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the end of a group of 32 tokens, and of a prompt in parts."""
    model = made(name)
    options: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    answer = model.generate(LONG[:, :60], **options)
    logits = model(answer, use_cache=False).logits
    assert torch.equal(answer[:, 60:], logits[:, 59:-1].argmax(-1))
    parts: list[int] = []
    by_parts = packed_part.unchecked
    monkeypatch.setattr(packed_part, "unchecked", lambda call: parts.append(call.q.shape[1]) or by_parts(call))
    assert torch.equal(answer, model.generate(LONG[:, :60], prefill_chunk_size=23, **options))
    assert set(parts) == {23, 14}
    monkeypatch.undo()
    beams = model.generate(LONG[:, :60], num_beams=3, **options)
    assert torch.equal(beams, torch.cat([model.generate(row[None, :60], num_beams=3, **options) for row in LONG]))


@pytest.mark.parametrize("name", ["hybrid", "window", "heads", "whole and windows"])
@torch.no_grad()
def test_tokens_are_taken_back(name: str) -> None:
    model = made(name)
    cache = DynamicCache(config=model.config)
    place_layers(model, cache)
    cache.activate_past_recording()
    for part in LONG.split([94, 6, 50], dim=1)[:2]:
        model(part, past_key_values=cache, use_cache=True)
    cache.crop(-5)
    found = model(LONG[:, 95:110], past_key_values=cache, use_cache=True).logits
    wanted = model(LONG[:, :110], use_cache=False).logits[:, 95:]
    assert (found - wanted).abs().max() < BOUND.get(name, 1e-9) * wanted.abs().max()
    plain = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(LONG[:1, :60], **plain)
    assert torch.equal(model.generate(LONG[:1, :60], prompt_lookup_num_tokens=4, **plain), expected)
    assert torch.equal(model.generate(LONG[:1, :60], assistant_model=copy.deepcopy(model), **plain), expected)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("teacher", 8),
        ("teacher", 4),
        ("sliding", 8),
        ("capped", 4),
        ("hybrid", 8),
        ("window", 4),
        ("heads", 4),
        ("whole and windows", 4),
    ],
)
@torch.no_grad()
def test_the_bytes_of_the_plan_are_those_of_the_cache(name: str, bits: int) -> None:
    model = made(name, bits).float()
    for tokens in (3, 32, 33, 150):
        cache = DynamicCache(config=model.config)
        model(LONG[:1, :tokens], past_key_values=cache, use_cache=True)
        assert cache_bytes(cache) == stored_bytes(model, tokens, bits) == sequence_bytes(model, tokens)
    assert all(isinstance(part, MixerCacheLayer) for part in cache.layers) or name in ("heads", "whole and windows")


@pytest.mark.parametrize("name", ["learned sinks", "hybrid", "window", "heads", "qwen3_5"])
@torch.no_grad()
def test_the_setting_belongs_to_the_model(name: str, tmp_path: Path) -> None:
    """Its configuration says it, so that it is saved and loaded; 16 bits leave no trace."""
    model = made(name).float()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.deltanet["cache_bits"] == cache_bits_of(loaded) == 4
    cache, wanted = DynamicCache(config=loaded.config), model(LONG[:1], use_cache=False).logits
    torch.testing.assert_close(loaded(LONG[:1], past_key_values=cache, use_cache=True).logits, wanted)
    packed = [layer for layer in cache.layers if any("codes" in state for state in states_of(layer))]
    assert len(packed) == (2 if name == "qwen3_5" else 4)
    set_cache_bits(loaded, 16).save_pretrained(tmp_path)
    assert "cache_bits" not in AutoModelForCausalLM.from_pretrained(tmp_path).config.deltanet
    loaded.config.deltanet["cache_bits"] = 5
    with pytest.raises(ValueError, match=r"deltanet.cache_bits: got 5, expected one of 16, 8, 4"):
        type(loaded)(loaded.config)


def parts_of(layer: Any) -> list[Any]:
    return list(layer.parts.values()) if isinstance(layer, MixedCacheLayer) else [layer]


def states_of(layer: Any) -> list[str]:
    """Names of the tensors of a cache's layer, in all its parts."""
    return [name for part in parts_of(layer) for name in getattr(part, "state", {})]


@pytest.mark.parametrize("name", ["sliding", "hybrid", "window", "heads", "whole and windows"])
def test_gradients_do_not_depend_on_whether_a_cache_is_filled(name: str) -> None:
    """A call has a cache by default; only with padding, or after other tokens, are there no gradients."""
    model, found = made(name), []
    for use_cache in (False, True):
        model.zero_grad()
        output = model(LONG, labels=LONG, use_cache=use_cache)
        output.loss.backward()
        found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    torch.testing.assert_close(found[0], found[1])
    with pytest.raises(ValueError, match="cache bits: gradients need whole sequences without padding"):
        model(LONG[:, :5], past_key_values=output.past_key_values)


@pytest.mark.parametrize(
    "spec", [QuantisedCacheSpec(4, None), QuantisedCacheSpec(8, 40, 4), QuantisedCacheSpec(4, 33, 2, 50)], ids=str
)
@torch.no_grad()
def test_sequences_that_begin_in_one_row(spec: QuantisedCacheSpec) -> None:
    """As each alone; a family's own window ends within them."""
    lengths = (70, 1, 33, 64)
    q, k, v = (torch.randn(1, sum(lengths), heads, 16) for heads in (4, 2, 2))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    held = QuantisedKVCache(spec, {}, None, lengths=lengths, cu_seqlens=bounds)
    found, sums = held.attend(q, k, v, 0.2, None)
    for row, (start, length) in enumerate(zip(bounds.tolist(), lengths, strict=False)):
        one, at = QuantisedKVCache(spec, {}, None), slice(start, start + length)
        wanted, wanted_sums = one.attend(q[:, at], k[:, at], v[:, at], 0.2, None)
        torch.testing.assert_close(found[:, at], wanted)
        torch.testing.assert_close(sums[:, at], wanted_sums)
        for name, x in one.state.items():
            own = held.state[name][row : row + 1]
            assert torch.equal(own if name == "count" else own[:, :, : x.shape[2]], x), name


@pytest.mark.parametrize(("trained", "length"), [(0, 5), (1, 1), (1, 5), (2, 1)])
def test_no_gradient_is_lost_after_other_tokens(trained: int, length: int) -> None:
    """As where LoRA adapters are on q and v alone."""
    inputs = [torch.randn(1, 40, 2, 16) for _ in range(3)]
    held = QuantisedKVCache(QuantisedCacheSpec(4, None), {}, None)
    held.attend(*inputs, 0.2, None)
    inputs = [x[:, :length] for x in inputs]
    held = QuantisedKVCache(QuantisedCacheSpec(4, None), held.state, None, seen=40)
    inputs[trained].requires_grad_()
    with pytest.raises(ValueError, match="cache bits: gradients need whole sequences without padding"):
        held.attend(*inputs, 0.2, None)


@torch.no_grad()
def test_a_model_in_a_wrapper_takes_other_bits() -> None:
    """Trainers hand over what `get_peft_model` made."""
    plain = made("heads")
    wanted = {bits: set_cache_bits(plain, bits)(LONG).logits for bits in (4, 16)}
    model = get_peft_model(plain, LoraConfig(r=2))
    for bits in (4, 16, 4):
        set_cache_bits(model, bits)
        assert LayerTable.of(model.config).cache_bits == cache_bits_of(model) == bits
        torch.testing.assert_close(model(LONG).logits, wanted[bits], rtol=1e-9, atol=1e-9)
    assert stored_bytes(model, 99, 4) == stored_bytes(model.get_base_model(), 99, 4)
    cache = DynamicCache(config=model.config)
    place_layers(model, cache)
    kinds = [type(layer) for layer in cache.layers]
    model(LONG, past_key_values=cache, use_cache=True)
    assert [type(layer) for layer in cache.layers] == kinds


def test_what_has_no_packed_form_is_refused() -> None:
    model, static = made("window"), {"cache_implementation": "static", "max_new_tokens": 2, "disable_compile": True}
    for packing in (model, set_cache_bits(tiny_student("llama", window=40), 4)):
        with pytest.raises(ValueError, match=r"cache bits: packed sequences are read in 16 bits; call set_cache_bits"):
            packing(LONG[:1], position_ids=torch.arange(150)[None] % 50, use_cache=False)
    with pytest.raises(ValueError, match="cache bits: a static cache holds 16 bits"):
        model.generate(LONG[:, :40], **static)
    with pytest.raises(ValueError, match=r"no room for what grows with the tokens \(PackedCacheLayer\)"):
        made("teacher").generate(LONG[:, :40], **static)


@pytest.mark.parametrize("changes", [{"mixer": "fox"}, {"mixer": "window", "window": 33, "sinks": 8}], ids=str)
@torch.no_grad()
def test_a_refused_number_of_bits_changes_no_layer(changes: dict[str, Any]) -> None:
    """Though softmax layers before the one that has no such form would take it."""
    model = tiny_student("llama", layers=(2,), **changes)
    wanted = model(LONG, use_cache=False).logits
    with pytest.raises(UserError, match=r"^cache bits: "):
        set_cache_bits(model, 4)
    assert cache_bits_of(model) == LayerTable.of(model.config).cache_bits == 16
    assert torch.equal(model(LONG, use_cache=False).logits, wanted)


def states(cache: Any) -> dict[str, Tensor]:
    return {f"{index}.{name}": x for index, layer in enumerate(cache.layers) for name, x in layer.state.items()}


@torch.no_grad()
def test_a_ring_holds_what_its_next_query_may_see() -> None:
    model = made("window")
    cache = DynamicCache(config=model.config)
    model(LONG, past_key_values=cache, use_cache=True)
    for name, held in states(cache).items():
        if name.endswith("key_codes"):
            assert held.shape[2] == -(-39 // GROUP)


@torch.no_grad()
def test_quantised_caches_of_transformers_serve_too() -> None:
    models = {"hybrid": made("hybrid", 16).float(), "heads": tiny_mixture("llama", mixed_table("softmax", "linear"))}
    try:
        caches = {name: QuantizedCache("fp8", model.config) for name, model in models.items()}
    except (ImportError, ValueError):
        pytest.skip("this version of transformers has no quantised cache without another package")
    for name, model in models.items():
        exact = DynamicCache(config=model.config)
        for part in LONG.split([103, 1, 46], dim=1):
            wanted = model(part, past_key_values=exact, use_cache=True).logits
            found = model(part, past_key_values=caches[name], use_cache=True).logits
        assert 0 < (found - wanted).norm() < 2**-4 * wanted.norm()  # rounding to 3 bits after the first loses at most
        assert cache_bytes(caches[name]) < cache_bytes(exact)
