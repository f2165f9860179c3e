"""Where `generate` of a converted model is entered, to decode by a captured step."""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from deltanet_hf.decoding.captured_graphs import captured_graphs_of, read_prompt
from deltanet_hf.decoding.captured_step import CapturedStep, NotCapturable, capacity_for, layout
from deltanet_hf.decoding.obstacles import inputs_obstacle, obstacle
from deltanet_hf.fast import FastDecoder, fast_form, held_form
from deltanet_hf.mixers.cache.argument import CACHE

logger = logging.get_logger(__name__)


class GraphedGeneration:
    """Comes before a family's model class: sampling and greedy decoding go through `GraphedDecoder`.

    `generate` asks `_valid_auto_compile_criteria` whether `get_compiled_call` is to take the place of the model's
    forward in decoding. Beam search and assisted decoding do so too, but not while `_sample` runs.
    """

    def train(self, mode: bool = True) -> Any:
        """As in PyTorch; `eval()` decides on the model's form, and may move its weights for it."""
        return self._decided(super().train(mode))  # type: ignore[misc]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Behind `to`, which does so too: afterwards weights lie elsewhere."""
        return self._decided(super()._apply(*args, **kwargs))  # type: ignore[misc]

    @staticmethod
    def _decided(model: Any) -> Any:
        if not model.training:
            fast_form(model)
        return model

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        with held_form(self):  # type: ignore[arg-type]
            return super().generate(*args, **kwargs)  # type: ignore[misc]

    def _sample(self, input_ids: Tensor, *args: Any, **options: Any) -> Any:
        options.pop("tokenizer", None)  # stopping criteria have it; transformers would hand it on to the model
        graphs, form = captured_graphs_of(self), fast_form(self)  # type: ignore[arg-type]
        reason = "called with positional arguments" if args else obstacle(self, input_ids.shape[1], options)
        form = form if reason is None else reason
        if isinstance(form, str):
            graphs.report = f"separate launches: {form}"
            logger.info("decoding by separate launches: %s", form)
            return super()._sample(input_ids, *args, **options)  # type: ignore[misc]
        decoder = GraphedDecoder(self, form, options["generation_config"])
        before = _ACTIVE.set(decoder)
        try:
            return super()._sample(input_ids, **options)  # type: ignore[misc]
        finally:
            _ACTIVE.reset(before)
            decoder.close()

    def _prefill(self, *args: Any, **kwargs: Any) -> Any:
        """A prompt is read without the decoder: a chunk of one token may be padding, which its step has not."""
        reading, before = _READING.set(_active(self) is not None), _ACTIVE.set(None)
        try:
            return super()._prefill(*args, **kwargs)  # type: ignore[misc]
        finally:
            _READING.reset(reading)
            _ACTIVE.reset(before)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # torch.compile cannot read _READING in torch 2.11.
        reads = not torch.compiler.is_compiling() and not args and _READING.get()
        output = read_prompt(self, kwargs) if reads else None
        return super().__call__(*args, **kwargs) if output is None else output  # type: ignore[misc]

    def _validate_generation_mode(self, generation_mode: Any, *args: Any, **kwargs: Any) -> None:
        captured_graphs_of(self).report = f"separate launches: the mode is {generation_mode.value}"  # type: ignore[arg-type]
        super()._validate_generation_mode(generation_mode, *args, **kwargs)  # type: ignore[misc]

    def _valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        if _active(self) is not None:
            return True
        return super()._valid_auto_compile_criteria(model_kwargs, generation_config)  # type: ignore[misc]

    def get_compiled_call(self, compile_config: Any) -> Any:
        return _active(self) or super().get_compiled_call(compile_config)  # type: ignore[misc]


class GraphedDecoder:
    """Stands for the forward of `model` during one call of `generate`.

    The first token is decoded by separate launches, which compiles and loads what the step needs; then the step is
    captured, unless the model has a graph that serves. Whatever a graph does not compute goes to the model.

    Args:
        form: the fast form of the model.
        generation: the configuration of the call.
    """

    def __init__(self, model: Any, form: FastDecoder, generation: Any) -> None:
        self.model, self._form, self._generation = model, form, generation
        self._graphs = captured_graphs_of(model)
        self._graphs.report = "separate launches: nothing was decoded"
        self._longest = 0 if generation.max_length is None else int(generation.max_length)
        self._step: CapturedStep | None = None
        self._cache: Cache | None = None
        self._key: Any = None
        self._warm = self._failed = self._closed = False

    def __call__(self, **inputs: Any) -> Any:
        """As the model's forward."""
        cache, ids = inputs.get(CACHE), inputs.get("input_ids")
        if self._closed or cache is None or ids is None or ids.shape[1] != 1 or not self._started(cache, inputs):
            self._leave()
            return self.model(**inputs)
        assert self._step is not None
        if self._step.buffers.full:
            self._make_room(cache, inputs)
        step = self._step
        step.set_inputs(inputs)
        logits = step.replay() if self._is_captured(step, cache) else step.run(self.model, cache)
        self._warm = True
        step.buffers.advance()
        return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})  # type: ignore[arg-type]

    def close(self) -> None:
        """Give the cache its own layers back, with everything that it has read. Nothing is decoded after that."""
        self._closed = True
        self._leave()

    def _leave(self) -> None:
        step, cache = self._step, self._cache
        if step is None or cache is None:
            return
        self._step = self._cache = None
        returned = self._generation.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
        if returned and step.buffers.grows:  # then the cache takes the memory, instead of a copy
            step.buffers.unload(cache, copied=False)
            return
        step.buffers.unload(cache, copied=returned)
        if not returned:
            cache.layers.clear()  # of a cache that nobody else has; its tensors are those of the graph
        if step.is_captured:
            self._graphs.put(step)

    def _started(self, cache: Cache, inputs: dict[str, Any]) -> bool:
        """Whether the cache is in place; brings it in at the first token."""
        if self._step is not None:
            return cache is self._cache
        seen = int(cache.get_seq_length())
        if seen == 0:
            return False
        try:
            shapes = layout(cache, self.model.config)
            reason = inputs_obstacle(inputs, seen)
        except NotCapturable as error:
            reason = str(error)
        if reason is not None:
            self._decline(reason)
            return False
        ids, positions = inputs["input_ids"], inputs["position_ids"]
        setting = (self.model.config._attn_implementation, positions.shape, ids.dtype, positions.dtype, ids.device)
        self._key = (shapes, setting, self._form)
        capacity = capacity_for(seen + 1, self._longest)
        self._step = self._graphs.take(len(ids), self._key, seen + 1, capacity)
        if self._step is None:
            self._step = self._new_step(cache, inputs, capacity)
        self._bring_in(cache, inputs, seen)
        return True

    def _new_step(self, cache: Cache, inputs: dict[str, Any], capacity: int) -> CapturedStep:
        self._warm = False
        with torch.inference_mode(False):  # such tensors may be changed in both modes
            return CapturedStep(self.model, cache, inputs, capacity, self._key, self._form)

    def _bring_in(self, cache: Cache, inputs: dict[str, Any], seen: int) -> None:
        assert self._step is not None
        mask = inputs.get("attention_mask")
        self._step.buffers.load(cache, seen, None if mask is None else mask[:, :seen].bool())
        self._cache = cache

    def _make_room(self, cache: Cache, inputs: dict[str, Any]) -> None:
        """Move to a step with more places."""
        assert self._step is not None
        buffers = self._step.buffers
        seen = buffers.seen
        buffers.unload(cache, copied=False)
        self._step = None  # frees what the cache does not hold
        self._step = self._new_step(cache, inputs, capacity_for(seen + 1, self._longest))
        self._bring_in(cache, inputs, seen)

    def _is_captured(self, step: CapturedStep, cache: Cache) -> bool:
        """Whether the step can be replayed; captures it once it has run."""
        if not step.is_captured and self._warm and not self._failed:
            try:
                step.capture(self.model, cache)
            except RuntimeError as error:
                self._failed = True
                reason = str(error).strip().partition("\n")[0]
                logger.warning("the decoding step could not be captured, and is launched token by token: %s", reason)
                self._decline(reason)
        if step.is_captured:
            self._graphs.report = "CUDA graph"
        return step.is_captured

    def _decline(self, reason: str) -> None:
        self._closed = self._step is None
        self._graphs.report = f"separate launches: {reason}"
        logger.info("decoding by separate launches: %s", reason)


_ACTIVE: ContextVar[GraphedDecoder | None] = ContextVar("deltanet_graphed_decoder", default=None)
_READING = ContextVar("deltanet_graphed_prompt", default=False)  # whether a prompt is read that may be captured


def _active(model: Any) -> GraphedDecoder | None:
    decoder = _ACTIVE.get()
    return decoder if decoder is not None and decoder.model is model else None
