"""Measures through quantised keys and values: what is read is what such a cache holds."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from deltanet_hf.evaluation.measures.sequence_bytes import sequence_bytes
from deltanet_hf.mixers.quantized_cache import BLOCK, quantized_cache
from deltanet_recipes.study.quantized_reading import QuantizedReading
from support.tiny_models import HYBRID, tiny_student

TOKENS = torch.randint(3, 97, (2, 4 * BLOCK + 7), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_one_part_is_exact() -> None:
    model = tiny_student("llama", layers=HYBRID)
    wanted = model(TOKENS, use_cache=False).logits
    for keep in (0, 1, 9):
        found = QuantizedReading(model, 4, part=1000)(TOKENS, logits_to_keep=keep).logits
        torch.testing.assert_close(found, wanted[:, -keep:] if keep else wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("bits", [8, 4])
def test_parts_read_what_is_stored(bits: int) -> None:
    model = tiny_student("llama", layers=HYBRID)
    cache, parts = quantized_cache(model.config, bits), []
    for part in TOKENS.split(BLOCK, dim=1):
        parts.append(model(part, past_key_values=cache, use_cache=True).logits)
    wanted = torch.cat(parts, dim=1)
    reading = QuantizedReading(model, bits)
    assert torch.equal(reading(TOKENS).logits, wanted)
    for keep in (1, 7, BLOCK + 8):
        torch.testing.assert_close(reading(TOKENS, logits_to_keep=keep).logits, wanted[:, -keep:])
    exact = model(TOKENS, use_cache=False).logits
    changed = (wanted - exact).abs().amax(-1)
    assert changed[:, : 2 * BLOCK].max() < 1e-4
    assert 1e-4 < changed[:, 3 * BLOCK :].max() < exact.std()


@torch.no_grad()
def test_a_given_cache_is_continued_and_is_small() -> None:
    model = tiny_student("llama", layers=HYBRID)
    reading, cache = QuantizedReading(model, 4), DynamicCache(config=model.config)
    first = reading(TOKENS[:, :-3], past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    rest = [reading(token, past_key_values=cache, use_cache=True).logits for token in TOKENS[:, -3:].split(1, dim=1)]
    torch.testing.assert_close(torch.cat([first, *rest], dim=1), reading(TOKENS, logits_to_keep=4).logits)
    assert sequence_bytes(reading, 1000) < 0.8 * sequence_bytes(model, 1000)
    assert reading.config is model.config
