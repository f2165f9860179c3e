"""Which calls read a prompt by a graph."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from deltanet_hf.decoding.capture import CAPTURES
from deltanet_hf.decoding.captured_graphs import CapturedPrefills, captured_graphs_of
from deltanet_hf.decoding.captured_prefill import CapturedPrefill
from deltanet_hf.decoding.obstacles import FLAGS, INPUTS, in_model
from deltanet_hf.fast import FastDecoder, fast_form
from deltanet_hf.fast.form import reason_of_call
from deltanet_hf.mixers.cache.argument import CACHE
from deltanet_hf.mixers.cache.key_values import as_cache_layer

logger = logging.get_logger(__name__)

LENGTHS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)  # that prompts are padded to
MOST_TOKENS = LENGTHS[-1]  # of all sequences together
# Weights times tokens: about 20 ms of an H100, which is as long as a host takes to launch 30 layers.
MOST_PRODUCTS = 4e12
KEPT = 8  # graphs per model; each holds the keys and values of its prompt


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
    while len(prompts.kept) > KEPT:
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
