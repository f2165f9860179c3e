"""Prompts by CUDA graph.

A short prompt is padded behind its end to one of a few lengths, for each of which the prefill is recorded once. No
token sees what follows it; what a prompt leaves (states, the ends of windows and convolutions, logits) is taken at its
own length, which the recording reads on the device. Parts of fixed lengths would need no length there, but what is left
of the prompt would take as many launches as all of it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from deltanet_hf.decoding.obstacles import FLAGS, INPUTS, in_model
from deltanet_hf.decoding.recorded_step import recordings_of
from deltanet_hf.decoding.recorders import RECORDERS, Recording
from deltanet_hf.fast import FastDecoder, fast_form
from deltanet_hf.fast.reasons import reason_of_call
from deltanet_hf.mixers.attention.single_query import UNMASKED, attending_by
from deltanet_hf.mixers.cache.argument import CACHE
from deltanet_hf.mixers.cache.key_values import as_cache_layer

logger = logging.get_logger(__name__)

LENGTHS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)  # that prompts are padded to
MOST_TOKENS = LENGTHS[-1]  # of all sequences together
# Weights times tokens: about 20 ms of an H100, which is as long as a host takes to launch 30 layers.
MOST_PRODUCTS = 4e12
KEPT = 8  # recordings per model; each holds the keys and values of its prompt


class RecordedPrompt:
    """The recorded prefill of so many sequences and tokens, with fixed addresses for everything that it uses.

    It runs once before that, which compiles and loads its kernels.

    Args:
        model: the model; it is not kept.
        form: its fast form.
        rows, tokens: of the prompt with its padding.
        memory: of another recorded prompt, see `Recording`.
    """

    def __init__(self, model: Any, form: FastDecoder, rows: int, tokens: int, memory: Any) -> None:
        device = model.device
        with torch.inference_mode(False):  # such tensors may be changed in both modes
            self._ids = torch.zeros(rows, tokens, dtype=torch.long, device=device)
            self._length = torch.full((1,), tokens, dtype=torch.long, device=device)
        self._run(model, form)
        self._recording: Recording = RECORDERS[device.type](lambda: self._run(model, form), device, memory)
        self.memory = self._recording.memory

    def _run(self, model: Any, form: FastDecoder) -> Tensor:
        self._cache = DynamicCache(config=model.config)
        with attending_by(model.config, UNMASKED):
            output = form(
                model,
                input_ids=self._ids,
                use_cache=True,
                logits_to_keep=self._length - 1,
                prompt_length=self._length,
                return_dict=True,
                **{CACHE: self._cache},
            )
        return output.logits  # type: ignore[return-value]

    def read(self, ids: Tensor, cache: Cache) -> Tensor:
        """Read sequences without padding, ids [rows, T], into an empty cache: logits of the last tokens [rows, 1, V].

        The cache gets layers of its own.
        """
        self._ids[:, : ids.shape[1]].copy_(ids)  # what follows are tokens of earlier prompts
        self._length.fill_(ids.shape[1])
        self._recording.replay()
        cache.layers[:] = _layers_after(self._cache, ids.shape[1])
        return self._recording.output.clone()


@dataclass
class RecordedPrompts:
    """The recorded prompts of one form of a model.

    They share memory, so that calls of several threads have to be on one CUDA stream, as they are by default.

    Attributes:
        recordable: whether there can be any.
        kept: by sequences and tokens, the one that was read last at the end.
    """

    form: FastDecoder
    recordable: bool
    kept: dict[tuple[int, int], RecordedPrompt] = field(default_factory=dict)


def read_prompt(model: Any, inputs: dict[str, Any]) -> CausalLMOutputWithPast | None:
    """The output of `model(**inputs)` by a recording; None for anything but a short prompt that can be recorded."""
    form, recordings = fast_form(model), recordings_of(model)
    unmasked = model.config._attn_implementation == "sdpa"
    if not isinstance(form, FastDecoder) or not unmasked or model.device.type not in RECORDERS:
        return None
    prompts = recordings.prompts
    if prompts is None or prompts.form is not form:
        recordable = form.takes_prompt_length and next(in_model(model), None) is None
        prompts = recordings.prompts = RecordedPrompts(form, recordable)
    tokens = _recorded_length(form, inputs)
    if not prompts.recordable or tokens is None or not _is_whole(inputs) or reason_of_call(model, {}) is not None:
        return None
    ids, cache = inputs["input_ids"], inputs[CACHE]
    key = len(ids), tokens
    prompt = prompts.kept.pop(key, None)  # meanwhile, another thread makes its own
    if prompt is None:
        other = next(iter(prompts.kept.values()), None)
        try:
            prompt = RecordedPrompt(model, form, len(ids), tokens, None if other is None else other.memory)
        except RuntimeError as error:
            prompts.recordable = False
            reason = str(error).strip().partition("\n")[0]
            logger.warning("prompts could not be recorded, and are read by separate launches: %s", reason)
            return None
    logits = prompt.read(ids, cache)
    prompts.kept[key] = prompt
    while len(prompts.kept) > KEPT:
        prompts.kept.pop(next(iter(prompts.kept)))
    return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})  # type: ignore[arg-type]


def _recorded_length(form: FastDecoder, inputs: dict[str, Any]) -> int | None:
    """The tokens of the recording for a call; None if the call is no prompt on an empty cache, or too long."""
    ids, cache = inputs.get("input_ids"), inputs.get(CACHE)
    further = any(value is not None and name not in INPUTS + FLAGS for name, value in inputs.items())
    if ids is None or type(cache) is not DynamicCache or cache.offloading or further:
        return None
    fitting = (length for length in LENGTHS if length >= ids.shape[1] > 1)
    tokens = next(fitting, MOST_TOKENS + 1)
    size = len(ids) * tokens
    if size > MOST_TOKENS or size * form.weights > MOST_PRODUCTS or inputs.get("logits_to_keep") != 1:
        return None
    return tokens if cache.layers and all(_is_empty(layer, tokens) for layer in cache.layers) else None


def _is_empty(layer: Any, tokens: int) -> bool:
    """Whether it is a key/value layer of transformers without tokens, which keeps so many of them."""
    if type(layer) is DynamicSlidingWindowLayer:
        return not layer.is_initialized and tokens < layer.sliding_window
    return type(layer) is DynamicLayer and not layer.is_initialized


def _is_whole(inputs: dict[str, Any]) -> bool:
    """Whether a call reads its sequences from their begin and without padding. The host waits for its masks."""
    ids, mask, positions = inputs["input_ids"], inputs.get("attention_mask"), inputs.get("position_ids")
    if not inputs.get("use_cache", True) or (mask is not None and (mask.shape != ids.shape or not bool(mask.all()))):
        return False
    return positions is None or bool((positions == torch.arange(ids.shape[1], device=positions.device)).all())


class _Copies:
    """Copies of tensors, made by few launches."""

    def __init__(self) -> None:
        self._pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))

    def of(self, x: Tensor) -> Tensor:
        """A contiguous tensor that is a copy of x, after `fill` at the latest."""
        if not x.is_contiguous():  # the first tokens alone
            return x.clone(memory_format=torch.contiguous_format)
        own, others = self._pairs[x.dtype]
        own.append(torch.empty_like(x))
        others.append(x)
        return own[-1]

    def fill(self) -> None:
        for own, others in self._pairs.values():
            torch._foreach_copy_(own, others)


def _layers_after(cache: Cache, tokens: int) -> list[Any]:
    """The layers of a cache that holds the first `tokens` tokens of a recorded one."""
    copies = _Copies()
    layers = [as_cache_layer(layer).after(tokens, copies.of) for layer in cache.layers]
    copies.fill()
    return layers
