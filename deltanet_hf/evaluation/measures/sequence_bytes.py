"""Bytes that one sequence takes, measured on the cache of a model that has read it."""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedModel

from deltanet_hf.evaluation.measures.decoding_mode import read
from deltanet_hf.mixers.cache.cache_bytes import cache_bytes


@torch.inference_mode()
def sequence_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Bytes of the cache after one sequence of `tokens` tokens: states, keys and values, and what windows note."""
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(1234)
    ids = torch.randint(0, vocabulary, (1, tokens), generator=generator).to(model.device)
    cache = DynamicCache(config=model.config)
    read(model, ids, cache)
    return cache_bytes(cache)
