"""A printer that keeps the time of each token, which `deltanet-hf generate` hands to `generate`."""

from __future__ import annotations

import time

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer


class CountingStreamer(TextStreamer):
    """Prints text as it is generated and records the time of each token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)  # type: ignore[arg-type]
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        super().put(value)
