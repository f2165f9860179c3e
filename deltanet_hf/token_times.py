"""What `deltanet-hf generate` hands to `generate`: a printer that keeps the time of each token, and an early stop."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, TextStreamer


class CountingStreamer(TextStreamer):
    """Prints text as it is generated and records the time of each token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)  # type: ignore[arg-type]
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        super().put(value)


class StopAfter(StoppingCriteria):
    """Stops generation after a number of tokens."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self.left -= 1
        return torch.full((len(input_ids),), self.left <= 0, device=input_ids.device)
