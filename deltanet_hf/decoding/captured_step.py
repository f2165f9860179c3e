"""The decoding step of a model at one batch size, and its graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from deltanet_hf.decoding.capture import CAPTURES, CapturedGraph
from deltanet_hf.decoding.static_cache import StaticCacheBuffers
from deltanet_hf.fast import FastDecoder
from deltanet_hf.mixers.attention.single_query import SINGLE_QUERY, attending_by
from deltanet_hf.mixers.cache.argument import CACHE
from deltanet_hf.mixers.layer.masks import NO_PADDING


class CapturedStep:
    """One step, with fixed addresses for everything that it reads and writes.

    Args:
        model: the model; it is not kept.
        cache: of the batch, for its shapes.
        inputs: of the model's forward: `input_ids` [B, 1] and `position_ids`.
        capacity: see `StaticCacheBuffers`.
        key: of everything that the graph depends on beside the number of tokens.
        form: the fast form of the model.
    """

    def __init__(
        self,
        model: Any,
        cache: Cache,
        inputs: dict[str, Any],
        capacity: int,
        key: Any,
        form: FastDecoder,
    ) -> None:
        self.key, self.batch = key, len(inputs["input_ids"])
        self._form = form
        self._ids, self._positions = (torch.empty_like(inputs[name]) for name in ("input_ids", "position_ids"))
        eager = model.config._attn_implementation == "eager"
        dtype = model.get_input_embeddings().weight.dtype if eager else torch.bool
        self.buffers = StaticCacheBuffers(cache, model.config, capacity, dtype)
        self._graph: CapturedGraph | None = None

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def set_inputs(self, inputs: dict[str, Any]) -> None:
        self._ids.copy_(inputs["input_ids"])
        self._positions.copy_(inputs["position_ids"])

    def run(self, model: Any, cache: Cache) -> Tensor:
        """The step on the inputs that were set, as separate launches: logits [B, 1, vocabulary]."""
        self.buffers.enter()
        with attending_by(model.config, SINGLE_QUERY):
            logits: Any = self._form(
                model,
                input_ids=self._ids,
                position_ids=self._positions,
                attention_mask=self.buffers.mask,
                padding=NO_PADDING,  # generated tokens are none
                use_cache=True,
                return_dict=True,
                **{CACHE: cache},
            ).logits
        return logits  # type: ignore[no-any-return]

    def capture(self, model: Any, cache: Cache) -> None:
        """Capture `run` without changing the cache."""
        device = self._ids.device
        self._graph = CAPTURES[device.type](lambda: self.run(model, cache), device)

    def replay(self) -> Tensor:
        """As `run`; the next call overwrites the result."""
        assert self._graph is not None
        self._graph.replay()
        return self._graph.output
