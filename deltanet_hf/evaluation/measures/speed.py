"""Memory and speed of a model at a given context length and batch size, measured on its cache."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from deltanet_hf.evaluation.measures.decoding_mode import EAGER, Mode, read
from deltanet_hf.mixers.cache.cache_bytes import cache_bytes

DECODED = 16  # steps


@dataclass(frozen=True)
class SpeedPoint:
    """A batch of prompts of `length` tokens, followed by steps of one token per prompt.

    Attributes:
        prefill_tokens_per_second, decode_tokens_per_second: of all prompts together.
        cache_bytes: size of all tensors in the cache after the prompts.
        peak_bytes: peak memory allocated on the accelerator beyond the weights; None on a CPU.
    """

    length: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    cache_bytes: int
    peak_bytes: int | None


@torch.inference_mode()
def measure_speed(
    model: PreTrainedModel, length: int, batch: int = 1, repeats: int = 1, mode: Mode = EAGER, steps: int = DECODED
) -> SpeedPoint:
    """Time prompts of random tokens and the steps after them: medians over `repeats` runs after one that compiles."""
    ids = random_tokens(model, batch, length, seed=1234)
    cuda = model.device.type == "cuda"
    prefills, decodings = [], []
    cache = None
    for _ in range(1 + repeats):
        del cache  # before the peak is measured
        if cuda:
            torch.cuda.reset_peak_memory_stats(model.device)
            before = torch.cuda.memory_allocated(model.device)
        cache = DynamicCache(config=model.config)
        began = _now(cuda)
        token = mode.prompt(model, ids, cache)
        prefills.append(_now(cuda) - began)
        held = cache_bytes(cache)
        step = mode.step(model, cache)
        began = _now(cuda)
        for _ in range(steps):
            token = step(token)
        decodings.append(_now(cuda) - began)
        del step
    return SpeedPoint(
        length=length,
        prefill_tokens_per_second=batch * length / statistics.median(prefills[1:]),
        decode_tokens_per_second=batch * steps / statistics.median(decodings[1:]),
        cache_bytes=held,
        peak_bytes=torch.cuda.max_memory_allocated(model.device) - before if cuda else None,
    )


@torch.inference_mode()
def sequence_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Bytes of the cache after one sequence of `tokens` tokens: states, keys and values, and what windows note."""
    cache = DynamicCache(config=model.config)
    read(model, random_tokens(model, 1, tokens, seed=1234), cache)
    return cache_bytes(cache)


def random_tokens(model: PreTrainedModel, batch: int, length: int, seed: int) -> Tensor:
    """Random tokens [B, T] of the model's vocabulary, on its device."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(0, vocabulary, (batch, length), generator=generator).to(model.device)


def _now(cuda: bool) -> float:
    """Seconds on a clock that has waited for the device."""
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
