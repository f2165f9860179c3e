"""A text that a model reads in several calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


def read_in_parts(
    model: Any, ids: Tensor, lengths: Iterable[int], mask: Tensor | None = None, cache: Any = None
) -> Tensor:
    """Logits of ids [B, T], read in parts of these lengths with one cache.

    Args:
        mask: [B, T], 0 at padding, which has no position.
        cache: a new `DynamicCache` by default.
    """
    cache = DynamicCache(config=model.config) if cache is None else cache
    logits, end = [], 0
    for length in lengths:
        start, end, given = end, end + length, {}
        if mask is not None:
            positions = (mask[:, :end].cumsum(-1) - 1).clamp(min=0)
            given = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:]}
        logits.append(model(ids[:, start:end], past_key_values=cache, use_cache=True, **given).logits)
    return torch.cat(logits, dim=1)
