"""Memory and speed of a model against the length of its context."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

_DECODED = 16


@dataclass(frozen=True)
class SpeedPoint:
    """One sequence of `length` tokens, then 16 more one by one, at batch 1.

    Attributes:
        cache_bytes: all tensors that the cache keeps after the prompt.
        peak_bytes: highest memory allocated on the accelerator beyond the weights; None on a CPU.
    """

    length: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    cache_bytes: int
    peak_bytes: int | None

    def to_dict(self) -> dict[str, float | int | None]:
        return asdict(self)


@torch.inference_mode()
def measure_speed(model: PreTrainedModel, length: int, seed: int = 1234) -> SpeedPoint:
    """Time a prompt of random tokens and the steps after it; the second of two runs counts (the first compiles)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (1, length), generator=generator)
    ids = ids.to(model.device)
    cuda = model.device.type == "cuda"
    for _ in range(2):
        if cuda:
            torch.cuda.reset_peak_memory_stats(model.device)
            before = torch.cuda.memory_allocated(model.device)
        cache = DynamicCache(config=model.config)
        start = _now(cuda)
        token = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
        prefilled = _now(cuda)
        held = cache_bytes(cache)
        for _ in range(_DECODED):
            token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        finished = _now(cuda)
    return SpeedPoint(
        length=length,
        prefill_tokens_per_second=length / (prefilled - start),
        decode_tokens_per_second=_DECODED / (finished - prefilled),
        cache_bytes=held,
        peak_bytes=torch.cuda.max_memory_allocated(model.device) - before if cuda else None,
    )


def cache_bytes(cache: DynamicCache) -> int:
    """Bytes of every tensor that the cache's layers hold: keys and values, or states and convolution tails."""
    tensors = [value for layer in cache.layers for value in vars(layer).values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _now(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
