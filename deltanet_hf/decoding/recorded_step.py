"""The decoding step of a model at one batch size, and its recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from deltanet_hf.decoding.fixed_cache import FixedCache
from deltanet_hf.decoding.recorders import RECORDERS, Recording
from deltanet_hf.mixers.attention.single_query import SINGLE_QUERY, attending_by
from deltanet_hf.mixers.cache.argument import CACHE
from deltanet_hf.mixers.layer.masks import NO_PADDING


class RecordedStep:
    """One step, with fixed addresses for everything that it reads and writes.

    Args:
        model: the model; it is not kept.
        cache: of the batch, for its shapes.
        inputs: of the model's forward: `input_ids` [B, 1] and `position_ids`.
        capacity: see `FixedCache`.
        key: of everything that the recording depends on beside the number of tokens.
        forward: the model's fast form, or another function of the model and the inputs of its forward.
    """

    def __init__(
        self,
        model: Any,
        cache: Cache,
        inputs: dict[str, Any],
        capacity: int,
        key: Any,
        forward: Callable[..., Any],
    ) -> None:
        self.key, self.batch = key, len(inputs["input_ids"])
        self._forward = forward
        self._ids, self._positions = (torch.empty_like(inputs[name]) for name in ("input_ids", "position_ids"))
        eager = model.config._attn_implementation == "eager"
        dtype = model.get_input_embeddings().weight.dtype if eager else torch.bool
        self.fixed = FixedCache(cache, model.config, capacity, dtype)
        self._recording: Recording | None = None

    @property
    def is_recorded(self) -> bool:
        return self._recording is not None

    def set_inputs(self, inputs: dict[str, Any]) -> None:
        self._ids.copy_(inputs["input_ids"])
        self._positions.copy_(inputs["position_ids"])

    def run(self, model: Any, cache: Cache) -> Tensor:
        """The step on the inputs that were set, as separate launches: logits [B, 1, vocabulary]."""
        self.fixed.enter()
        with attending_by(model.config, SINGLE_QUERY):
            logits: Tensor = self._forward(
                model,
                input_ids=self._ids,
                position_ids=self._positions,
                attention_mask=self.fixed.mask,
                padding=NO_PADDING,  # generated tokens are none
                use_cache=True,
                return_dict=True,
                **{CACHE: cache},
            ).logits
        return logits

    def record(self, model: Any, cache: Cache) -> None:
        """Record `run` without changing the cache."""
        device = self._ids.device
        self._recording = RECORDERS[device.type](lambda: self.run(model, cache), device)

    def replay(self) -> Tensor:
        """As `run`; the next call overwrites the result."""
        assert self._recording is not None
        self._recording.replay()
        return self._recording.output
