"""One model measured at several batch sizes and context lengths, in several modes of decoding."""

from __future__ import annotations

import gc
import statistics
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from deltanet_hf.errors import QualityError, UserError, one_line
from deltanet_hf.evaluation.measures.decoding_mode import EAGER, GRAPH, MOST_STEPS, Mode
from deltanet_hf.evaluation.measures.speed import random_tokens, timed_prompt, timed_steps
from deltanet_hf.evaluation.speed.check_decoding import check_decoding
from deltanet_hf.mixers.cache.cache_bytes import cache_bytes

Point = tuple[int, int]
"""Sequences, and the tokens of each prompt."""
PREFILLS = 3  # timed
SLOW = 4.0  # seconds of a prefill that is timed only once
DECODINGS = 3
STEPS = {EAGER.name: 16}
"""Steps of a run by separate launches, which take longest."""


class Prefill(NamedTuple):
    """Speed of reading prompts, of all sequences together, and the size of the cache that they left."""

    tokens_per_s: float
    cache_mb: float
    repeats: int


class _Filled(NamedTuple):
    """A cache that holds prompts, and the likeliest next tokens [B, 1]."""

    cache: Cache
    token: Tensor


class ModelAtPoints:
    """Measures a model.

    Args:
        prefills: that have been measured before.
        prompts: the mode that reads prompts.
    """

    def __init__(self, model: PreTrainedModel, prefills: dict[Point, Prefill], prompts: Mode = GRAPH) -> None:
        self._model, self._prefills, self._prompts = model, prefills, prompts
        self._checked: dict[str, Exception | None] = {}

    @torch.inference_mode()
    def measure(self, mode: Mode, point: Point) -> dict[str, Any]:
        """The figures of a row.

        Raises:
            QualityError: the mode decodes other tokens than a complete forward pass.
            UserError: the mode cannot be had for this model.
            torch.OutOfMemoryError: the point does not fit.
        """
        free_memory()
        self._check(mode)
        ids = random_tokens(self._model, *point, seed=1234)
        filled = None
        if point not in self._prefills:
            self._prefills[point], filled = self._prefill(ids)
        if filled is None:
            filled = self._fill(ids)[1]
        prefill = self._prefills[point]
        return {
            "prefill_tokens_per_s": prefill.tokens_per_s,
            "decode_ms": round(1000 * self._step_seconds(mode, filled), 4),
            "cache_mb": prefill.cache_mb,
            "repeats": prefill.repeats,
        }

    def _check(self, mode: Mode) -> None:
        if mode.name not in self._checked:
            try:
                worst = check_decoding(self._model, mode)
            except (QualityError, UserError) as error:
                # Not the error itself, whose frames hold caches.
                self._checked[mode.name] = type(error)(one_line(error))
            else:
                self._checked[mode.name] = None
                free_memory()
                print(f"{mode.name}: greedy tokens are right (rounding: {worst:.3f})", flush=True)
        if (refused := self._checked[mode.name]) is not None:
            raise refused

    def _fill(self, ids: Tensor) -> tuple[float, _Filled]:
        cache = DynamicCache(config=self._model.config)
        seconds, token = timed_prompt(self._prompts, self._model, ids, cache)
        return seconds, _Filled(cache, token)

    def _prefill(self, ids: Tensor) -> tuple[Prefill, _Filled]:
        """Time prompts after a run that loads the kernels; also returns what the last of them left."""
        _, filled = self._fill(ids)
        times: list[float] = []
        while not times or (len(times) < PREFILLS and times[0] <= SLOW):
            del filled  # before the next cache is made
            seconds, filled = self._fill(ids)
            times.append(seconds)
        rate = round(ids.numel() / statistics.median(times), 1)
        return Prefill(rate, round(cache_bytes(filled.cache) / 1e6, 3), len(times)), filled

    def _step_seconds(self, mode: Mode, filled: _Filled) -> float:
        step = mode.step(self._model, filled.cache)
        count = STEPS.get(mode.name, MOST_STEPS // (1 + DECODINGS))
        _, token = timed_steps(step, filled.token, count)
        times = []
        for _ in range(DECODINGS):
            seconds, token = timed_steps(step, token, count)
            times.append(seconds)
        return statistics.median(times) / count


def free_memory() -> None:
    """Give back what nobody uses any more: modules and graphs refer to themselves."""
    gc.collect()
    torch.cuda.empty_cache()
