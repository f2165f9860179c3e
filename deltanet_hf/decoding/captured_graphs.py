"""The graphs of each model: steps by batch size, and prompts, with the calls that read one by a graph."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from deltanet_hf.decoding.capture import CAPTURES
from deltanet_hf.decoding.captured_prefill import CapturedPrefill
from deltanet_hf.decoding.captured_step import CapturedStep
from deltanet_hf.decoding.obstacles import FLAGS, INPUTS, in_model
from deltanet_hf.fast import FastDecoder, fast_form
from deltanet_hf.fast.form import reason_of_call
from deltanet_hf.mixers.cache.argument import CACHE
from deltanet_hf.mixers.cache.key_values import as_cache_layer

logger = logging.get_logger(__name__)

KEPT_STEPS = 4  # per model, of as many batch sizes; each holds the states of its batch
KEPT_PREFILLS = 8  # per model; each holds the keys and values of its prompt
LENGTHS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)  # that prompts are padded to
MOST_TOKENS = LENGTHS[-1]  # of all sequences together
# Weights times tokens: about 20 ms of an H100, which is as long as a host takes to launch 30 layers.
MOST_PRODUCTS = 4e12


@dataclass
class CapturedPrefills:
    """The captured prompts of one form of a model.

    They share memory, so that calls of several threads have to be on one CUDA stream, as they are by default.

    Attributes:
        capturable: whether there can be any.
        kept: by sequences and tokens, the one that was read last at the end.
    """

    form: FastDecoder
    capturable: bool
    kept: dict[tuple[int, int], CapturedPrefill] = field(default_factory=dict)


class CapturedGraphs:
    """The captured steps of one model, by batch size, and its captured prompts (`captured_prefill.py`)."""

    def __init__(self) -> None:
        self._steps: OrderedDict[int, CapturedStep] = OrderedDict()
        self.prompts: CapturedPrefills | None = None
        self.report = "separate launches: nothing was decoded, or the model is not a converted one"

    def take(self, batch: int, key: Any, tokens: int, capacity: int) -> CapturedStep | None:
        """The graph for this batch size, if it can serve; it is not kept until `put`.

        Args:
            tokens: that it has to hold.
            capacity: of a new one; one with more than twice as many places would read too many.
        """
        step = self._steps.pop(batch, None)
        if step is None:
            return None
        if step.key != key:
            if step.key[-1] != key[-1]:  # the model has changed
                self.clear()
            return None
        if step.buffers.grows and not tokens <= step.buffers.capacity <= 2 * capacity:
            return None
        return step

    def put(self, step: CapturedStep) -> None:
        """Keep a graph; of those with growing keys and values, only this one."""
        if step.buffers.grows:
            self._steps = OrderedDict((size, kept) for size, kept in self._steps.items() if not kept.buffers.grows)
        self._steps[step.batch] = step
        while len(self._steps) > KEPT_STEPS:
            self._steps.popitem(last=False)

    def clear(self) -> None:
        self._steps.clear()
        self.prompts = None


_GRAPHS: WeakKeyDictionary[nn.Module, CapturedGraphs] = WeakKeyDictionary()


def captured_graphs_of(model: nn.Module) -> CapturedGraphs:
    """The graphs of a model, which live as long as it does."""
    return _GRAPHS.setdefault(model, CapturedGraphs())


def forget_graphs(model: nn.Module) -> None:
    """Free the graphs and buffers that `generate` keeps with a model for its next call."""
    captured_graphs_of(model).clear()


def decoded_by(model: nn.Module) -> str:
    """How a model's last `generate` decoded: "CUDA graph", or "separate launches" with the reason."""
    return captured_graphs_of(model).report


def read_prompt(model: Any, inputs: dict[str, Any]) -> CausalLMOutputWithPast | None:
    """The output of `model(**inputs)` by a graph; None for anything but a short prompt that can be captured."""
    form, graphs = fast_form(model), captured_graphs_of(model)
    unmasked = model.config._attn_implementation == "sdpa"
    if not isinstance(form, FastDecoder) or not unmasked or model.device.type not in CAPTURES:
        return None
    prompts = graphs.prompts
    if prompts is None or prompts.form is not form:
        capturable = form.takes_prompt_length and next(in_model(model), None) is None
        prompts = graphs.prompts = CapturedPrefills(form, capturable)
    tokens = _captured_length(form, inputs)
    if not prompts.capturable or tokens is None or not _is_whole(inputs) or reason_of_call(model, {}) is not None:
        return None
    ids, cache = inputs["input_ids"], inputs[CACHE]
    key = len(ids), tokens
    prompt = prompts.kept.pop(key, None)  # meanwhile, another thread makes its own
    if prompt is None:
        other = next(iter(prompts.kept.values()), None)
        try:
            prompt = CapturedPrefill(model, form, len(ids), tokens, None if other is None else other.memory)
        except RuntimeError as error:
            prompts.capturable = False
            reason = str(error).strip().partition("\n")[0]
            logger.warning("prompts could not be captured, and are read by separate launches: %s", reason)
            return None
    logits = prompt.read(ids, cache)
    prompts.kept[key] = prompt
    while len(prompts.kept) > KEPT_PREFILLS:
        prompts.kept.pop(next(iter(prompts.kept)))
    return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})  # type: ignore[arg-type]


def _captured_length(form: FastDecoder, inputs: dict[str, Any]) -> int | None:
    """The tokens of the graph for a call; None if the call is no prompt on an empty cache, or too long."""
    ids, cache = inputs.get("input_ids"), inputs.get(CACHE)
    further = any(value is not None and name not in INPUTS + FLAGS for name, value in inputs.items())
    if ids is None or type(cache) is not DynamicCache or cache.offloading or further:
        return None
    fitting = (length for length in LENGTHS if length >= ids.shape[1] > 1)
    tokens = next(fitting, MOST_TOKENS + 1)
    size = len(ids) * tokens
    if size > MOST_TOKENS or size * form.weights > MOST_PRODUCTS or inputs.get("logits_to_keep") != 1:
        return None
    empty = all(as_cache_layer(layer).takes_prompt(tokens) for layer in cache.layers)
    return tokens if cache.layers and empty else None


def _is_whole(inputs: dict[str, Any]) -> bool:
    """Whether a call reads its sequences from their begin and without padding. The host waits for its masks."""
    ids, mask, positions = inputs["input_ids"], inputs.get("attention_mask"), inputs.get("position_ids")
    if not inputs.get("use_cache", True) or (mask is not None and (mask.shape != ids.shape or not bool(mask.all()))):
        return False
    return positions is None or bool((positions == torch.arange(ids.shape[1], device=positions.device)).all())
