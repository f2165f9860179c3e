"""The ways to decode whose speed is measured.

A mode says how prompts are read into a cache and how one more token is computed on it. What it does once per cache,
such as capturing a graph, belongs into `step` and is not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from deltanet_hf.decoding.captured_graphs import read_prompt
from deltanet_hf.decoding.captured_step import NotCapturable
from deltanet_hf.decoding.graphed_step import graphed_step
from deltanet_hf.errors import UserError
from deltanet_hf.mixers.cache.argument import CACHE

MOST_STEPS = 256  # of a step made here
Step = Callable[[Tensor], Tensor]
"""The likeliest next tokens [B, 1] after the tokens [B, 1], which it reads into the cache."""


@dataclass(frozen=True)
class Mode:
    """A way to decode.

    Attributes:
        prompt: reads prompts [B, T] into the empty cache; the likeliest next tokens [B, 1].
        step: makes the step of a model on a cache that holds the prompt.
    """

    name: str
    prompt: Callable[[PreTrainedModel, Tensor, Cache], Tensor]
    step: Callable[[PreTrainedModel, Cache], Step]


def _eager(model: PreTrainedModel, cache: Cache) -> Step:
    def step(token: Tensor) -> Tensor:
        return read(model, token, cache)

    return step


def _graphed(model: PreTrainedModel, cache: Cache) -> Step:
    try:
        logits = graphed_step(model, cache, MOST_STEPS)
    except NotCapturable as error:
        raise UserError(f"--mode graph: the decoding step cannot be captured ({error}); use --mode eager") from error
    return lambda token: logits(token).argmax(-1)


def read(model: PreTrainedModel, tokens: Tensor, cache: Cache) -> Tensor:
    """Read tokens [B, T] into the cache; the likeliest next tokens [B, 1]."""
    return model(tokens, use_cache=True, logits_to_keep=1, **{CACHE: cache}).logits[:, -1:].argmax(-1)


def read_captured(model: PreTrainedModel, tokens: Tensor, cache: Cache) -> Tensor:
    """As `read`, by a graph where there can be one, as `generate` reads prompts."""
    inputs = {"input_ids": tokens, CACHE: cache, "use_cache": True, "logits_to_keep": 1}
    output: Any = read_prompt(model, inputs)
    return read(model, tokens, cache) if output is None else output.logits.argmax(-1)


EAGER = Mode("eager", read, _eager)
GRAPH = Mode("graph", read_captured, _graphed)
MODES = {mode.name: mode for mode in (EAGER, GRAPH)}
