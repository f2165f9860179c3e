"""Quantised keys and values: their error, their bytes, and how they work with converted layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, QuantizedCache

from deltanet_hf.errors import UserError
from deltanet_hf.mixers.mixed_cache import MixedCacheLayer
from deltanet_hf.mixers.quantized_cache import BLOCK, QuantizedKVLayer, dequantise, quantise, quantized_cache
from deltanet_hf.mixers.state import MixerCacheLayer, cache_bytes
from support.tiny_models import HYBRID, mixed_mixture_table, mixed_table, tiny_mixture, tiny_student, tiny_teacher

LONG = torch.randint(3, 97, (2, 3 * BLOCK + 5), generator=torch.Generator().manual_seed(0))


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [2, 8, 64])
def test_the_error_is_half_a_step(bits: int, size: int) -> None:
    x = random(3, 5, size) * 10 + 3
    again = dequantise(quantise(x, bits), bits)
    step = (x.amax(-1) - x.amin(-1)) / (2**bits - 1)
    assert ((again - x).abs().amax(-1) <= 0.5001 * step).all()
    assert torch.equal(dequantise(quantise(again, bits), bits).argmax(-1), again.argmax(-1))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_dtypes_and_constant_groups(bits: int, dtype: torch.dtype) -> None:
    x = random(4, 64, dtype=dtype)
    x[0], x[1] = 0.0, -7.0
    again = dequantise(quantise(x, bits), bits)
    assert again.dtype == dtype
    assert torch.equal(again[:2], x[:2])
    assert (again - x).abs().max() <= (6 / (2**bits - 1) if bits == 4 else 0.06)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("parts", [[197], [1] * 197, [130, 1, 1, 65], [64, 64, 69], [63, 1, 133]], ids=str)
def test_however_it_is_filled_it_holds_the_same(bits: int, parts: list[int]) -> None:
    """Old tokens have been quantised once, whatever the calls were; the most recent ones are exact."""
    keys, values = random(2, 3, 197, 16), random(2, 3, 197, 16).flip(0)
    layer, whole = QuantizedKVLayer(bits), QuantizedKVLayer(bits)
    for k, v in zip(keys.split(parts, dim=2), values.split(parts, dim=2), strict=True):
        seen = layer.update(k, v)
        assert torch.equal(seen[0][:, :, -k.shape[2] :], k)
        assert seen[1].shape[2] == layer.get_seq_length()
    whole.update(keys, values)
    assert layer.keys.shape[2] == whole.keys.shape[2] == 197 - 2 * BLOCK
    probe = random(2, 3, 1, 16)
    for got, wanted, exact in zip(layer.update(probe, probe), whole.update(probe, probe), (keys, values), strict=True):
        assert torch.equal(got, wanted)
        assert torch.equal(got[:, :, 2 * BLOCK : 197], exact[:, :, 2 * BLOCK :])
        spread = exact.amax() - exact.amin()
        assert (got[:, :, :197] - exact).abs().max() <= spread / (2**bits - 1)


def test_a_large_channel_of_the_keys_does_not_spoil_the_others() -> None:
    keys = random(1, 1, 2 * BLOCK, 16)
    keys[..., 3] += 1000.0
    layer = QuantizedKVLayer(4)
    layer.update(keys, keys)
    found, _ = layer.update(keys[:, :, :1], keys[:, :, :1])
    assert (found[:, :, :BLOCK] - keys[:, :, :BLOCK]).abs().max() < 0.3


def test_bytes_are_those_of_codes_scales_and_recent_tokens() -> None:
    for bits, dtype in ((8, torch.bfloat16), (4, torch.bfloat16), (4, torch.float32)):
        layer = QuantizedKVLayer(bits)
        x = random(2, 3, 4 * BLOCK + 7, 128, dtype=dtype)
        layer.update(x, x)
        numbers, recent = 2 * 3 * 3 * BLOCK * 128, 2 * 3 * (BLOCK + 7) * 128
        scales = 2 * (numbers // 64) * dtype.itemsize  # one scale and one lowest value for 64 numbers
        cache = DynamicCache()
        cache.layers.append(layer)
        assert cache_bytes(cache) == 2 * (numbers * bits // 8 + scales + recent * dtype.itemsize)


def test_batch_operations_and_reset() -> None:
    keys, values = random(2, 3, 150, 16), random(2, 3, 150, 16).flip(0)
    layer, swapped = QuantizedKVLayer(4), QuantizedKVLayer(4)
    for empty in (layer, swapped):
        empty.batch_repeat_interleave(2)
        empty.reorder_cache(torch.tensor([0]))
    layer.update(keys, values)
    swapped.update(keys.flip(0), values.flip(0))
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0, 3]))
    layer.reorder_cache(torch.tensor([1, 0]))
    layer.offload()
    layer.prefetch()
    for got, wanted in zip(layer.update(keys, values), swapped.update(keys, values), strict=True):
        assert torch.equal(got, wanted)
    layer.crop(0)
    with pytest.raises(ValueError, match="crop: cannot take back 2 tokens of a quantised cache"):
        layer.crop(-2)
    layer.reset()
    assert layer.get_seq_length() == 0
    assert torch.equal(layer.update(keys, values)[0], keys)


def made(name: str) -> PreTrainedModel:
    if name == "hybrid":
        return tiny_student("llama", layers=HYBRID)
    return tiny_teacher("llama") if name == "teacher" else tiny_mixture("llama", mixed_table("softmax", "linear"))


@pytest.mark.parametrize("name", ["hybrid", "mixed", "teacher"])
@torch.no_grad()
def test_models_decode_as_with_exact_keys(name: str) -> None:
    model = made(name)
    logits, sizes = {}, {}
    for bits in (None, 8, 4):
        cache = DynamicCache(config=model.config) if bits is None else quantized_cache(model.config, bits)
        parts = LONG.split([150, 1, 1, 45], dim=1)
        found = [model(part, past_key_values=cache, use_cache=True).logits for part in parts]
        logits[bits], sizes[bits] = torch.cat(found, dim=1), cache_bytes(cache)
        assert cache.get_seq_length() == LONG.shape[1]
        kinds = {type(layer) for layer in cache.layers}
        if bits is not None and name == "hybrid":
            assert kinds == {MixerCacheLayer, QuantizedKVLayer}
        if bits is not None and name == "mixed":
            assert kinds == {MixedCacheLayer}
            assert {type(layer.parts["softmax"]) for layer in cache.layers} == {QuantizedKVLayer}
    assert sizes[4] < sizes[8] < sizes[None]
    size = logits[None].norm()
    errors = {bits: float((logits[bits] - logits[None])[:, 150:].norm() / size) for bits in (8, 4)}
    assert torch.equal(logits[8][:, :150], logits[None][:, :150])  # reading the first chunk is exact
    assert 0 < errors[8] < 5e-3
    assert errors[8] < errors[4] < 0.1


@pytest.mark.parametrize("bits", [8, 4])
@torch.no_grad()
def test_generation_beams_and_padding(bits: int) -> None:
    """Tokens are those of the exact cache while they are within the exact recent ones."""
    model = made("mixed")
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :6] = 0
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for more in ({}, {"num_beams": 3}):
        exact = model.generate(LONG[:, :20], attention_mask=mask, **options, **more)
        cache = quantized_cache(model.config, bits)
        assert model.generate(LONG[:, :20], attention_mask=mask, past_key_values=cache, **options, **more).equal(exact)


@pytest.mark.parametrize("bits", [pytest.param(8, marks=pytest.mark.slow), 4])
@torch.no_grad()
def test_beams_over_quantised_tokens_are_those_of_each_row_alone(bits: int) -> None:
    """Beams beside softmax heads, a window and states in one layer; most of the prompt is in the codes."""
    model = tiny_mixture("llama", mixed_mixture_table())
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "num_beams": 3}

    def beams(rows: torch.Tensor, count: int) -> list[list[int]]:
        cache = quantized_cache(model.config, bits)
        found = model.generate(rows, past_key_values=cache, num_return_sequences=count, pad_token_id=0, **options)
        codes = cache.layers[0].parts["softmax"]._quantized_values[0]
        assert (codes.shape[0], codes.shape[2]) == (3 * len(rows), BLOCK)
        return found[:, 140:].tolist()

    together = beams(LONG[:, :140], 3)
    assert together == beams(LONG[:1, :140], 3) + beams(LONG[1:, :140], 3)
    assert together[:3] != together[3:]
    assert len({tuple(row) for row in together[:3]}) == 3


@torch.no_grad()
def test_sliding_layers_stay_as_they_are() -> None:
    model = tiny_teacher("gemma3_text")
    cache = quantized_cache(model.config, 4)
    assert [type(layer).__name__ for layer in cache.layers] == ["DynamicSlidingWindowLayer", "QuantizedKVLayer"] * 2
    model(LONG, past_key_values=cache, use_cache=True)
    assert cache.get_seq_length() == LONG.shape[1]


@torch.no_grad()
def test_transformers_own_quantised_cache_serves_too() -> None:
    try:
        layers = [QuantizedCache("fp8", made(name).config) for name in ("hybrid", "mixed")]
    except (ImportError, ValueError):
        pytest.skip("this version of transformers has no quantised cache without another package")
    for name, cache in zip(("hybrid", "mixed"), layers, strict=True):
        model = made(name)
        exact = DynamicCache(config=model.config)
        for part in LONG.split([150, 1, 46], dim=1):
            wanted = model(part, past_key_values=exact, use_cache=True).logits
            found = model(part, past_key_values=cache, use_cache=True).logits
        assert (found - wanted).norm() < 2**-4 * wanted.norm()  # what rounding to 3 bits after the first loses at most
        assert cache_bytes(cache) < cache_bytes(exact)


def test_other_numbers_of_bits_are_refused() -> None:
    with pytest.raises(UserError, match="got 3, expected 8 or 4"):
        quantized_cache(made("teacher").config, 3)
