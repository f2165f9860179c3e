"""Memory and speed of a model at a given context length."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from deltanet_hf.mixers.state import cache_bytes

_DECODED = 16  # steps


@dataclass(frozen=True)
class SpeedPoint:
    """A prompt of `length` tokens followed by 16 single-token steps, at batch size 1.

    Attributes:
        cache_bytes: size of all tensors in the cache after the prompt.
        peak_bytes: peak memory allocated on the accelerator beyond the weights; None on a CPU.
    """

    length: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    cache_bytes: int
    peak_bytes: int | None

    def to_dict(self) -> dict[str, float | int | None]:
        """JSON form."""
        return asdict(self)


@torch.inference_mode()
def measure_speed(model: PreTrainedModel, length: int, seed: int = 1234) -> SpeedPoint:
    """Time a prompt of random tokens and the steps after it. The first of two runs compiles; the second is timed."""
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


def _now(cuda: bool) -> float:
    """Seconds on a clock that has waited for the device."""
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
