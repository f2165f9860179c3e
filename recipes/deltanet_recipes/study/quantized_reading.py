"""A model whose measures are taken through a cache that keeps keys and values in 8 or 4 bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from deltanet_hf.mixers.quantized_cache import BLOCK, quantized_cache


class QuantizedReading:
    """Stands for a model: reads tokens in parts, so that all but the most recent ones are seen as they are stored.

    Args:
        bits: 8 or 4; see `quantized_cache`.
        part: tokens of a part. Within a part, and up to 2 * `BLOCK` - 1 tokens before it, keys and values are exact.
    """

    def __init__(self, model: PreTrainedModel, bits: int, part: int = BLOCK) -> None:
        self._model, self._bits, self._part = model, bits, part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(
        self, ids: Tensor, past_key_values: Any = None, use_cache: bool = False, logits_to_keep: int = 0
    ) -> SimpleNamespace:
        """Logits of the last `logits_to_keep` tokens, 0 for all, of ids [B, T]; a cache that is given is continued."""
        cache: Any = DynamicCache(config=self._model.config) if past_key_values is None else past_key_values
        if not cache.get_seq_length():
            cache.layers = quantized_cache(self._model.config, self._bits).layers
        length = ids.shape[1]
        first, logits = length - (logits_to_keep or length), []
        for start in range(0, length, self._part):
            part = ids[:, start : start + self._part]
            kept = start + part.shape[1] - max(start, first)
            found = self._model(part, past_key_values=cache, use_cache=True, logits_to_keep=max(kept, 1)).logits
            if kept > 0:
                logits.append(found)
        return SimpleNamespace(logits=torch.cat(logits, dim=1))
