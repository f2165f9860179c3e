"""Converted layers in vLLM: the project's own modules, with what they keep in vLLM's cache."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context

from deltanet_hf.fast.mixer import FastMixer
from deltanet_hf.mixers.attention.packed_softmax import PackedSoftmax
from deltanet_hf.mixers.attention.routed_config import RoutedConfig
from deltanet_hf.mixers.cache.packed_reach import PACKED
from deltanet_hf.mixers.cache.state import MixerCacheLayer, TensorShape
from deltanet_hf.mixers.cache.window_cache import Tokens
from deltanet_hf.mixers.layer.layer_kind import PositionEmbeddings
from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_hf.mixers.layer.mixer import Mixer
from deltanet_hf.vllm_plugin.batch import SequencePart, StateBatch, TokenBatch
from deltanet_hf.vllm_plugin.cache import PackedPages, StatePages, TokenPages
from deltanet_kernels.packed_cache.layout import GROUP


def served(layer: Any, name: str, vllm_config: VllmConfig) -> ServedLayer:
    """The module that stands in a decoder for a converted layer.

    Args:
        layer: the layer.
        name: its name in the model, under which it stays.
        vllm_config: vLLM's settings.
    """
    kind: Any
    if isinstance(layer, PackedSoftmax):
        kind = PackedLayer if layer.kept.window is None else StateLayer
    else:
        kind = GrowingLayer if layer.growing_heads else StateLayer
    made: ServedLayer = kind(layer, name, vllm_config)
    return made


class ServedLayer(nn.Module, ABC):
    """Base of the modules that stand for a converted layer; arguments as in `served`."""

    def __init__(self, layer: Any, name: str) -> None:
        super().__init__()
        if isinstance(getattr(layer, "config", None), RoutedConfig):  # a family's attention, whose masks are made here
            whole = copy.copy(layer.config.whole)
            whole._attn_implementation = "sdpa"
            layer.config = RoutedConfig(whole, layer.config._attn_implementation)
        self.layer, self.name = layer, name
        self.alone = name.endswith(".linear_attn")  # Qwen3.5's layers take the output alone

    def forward(
        self, hidden_states: Tensor, position_embeddings: PositionEmbeddings | None = None, **kwargs: Any
    ) -> Any:
        """hidden_states [1, T, hidden] of all tokens of a step -> the same, alone or with None."""
        steps: Any = get_forward_context().attn_metadata
        if steps is None:  # vLLM measures the memory that a step needs
            output = self.whole(hidden_states, position_embeddings)
        else:
            output = self.step(steps, hidden_states, position_embeddings)
        return output if self.alone else (output, None)

    @abstractmethod
    def whole(self, x: Tensor, position_embeddings: PositionEmbeddings | None) -> Tensor:
        """The layer on one sequence x [1, T, hidden], of which nothing is kept."""

    @abstractmethod
    def step(self, steps: dict[str, Any], x: Tensor, position_embeddings: PositionEmbeddings | None) -> Tensor:
        """The layer on all tokens x [1, T, hidden] of a step; `steps` has their sequences, by names of caches."""


class StateLayer(ServedLayer):
    """A layer with a state of constant size: a mixer, or softmax attention under a window."""

    def __init__(self, layer: Any, name: str, vllm_config: VllmConfig) -> None:
        super().__init__(layer, name)
        packed, dtype = isinstance(layer, PackedSoftmax), vllm_config.model_config.dtype
        shapes = packed_shapes(layer, dtype) if packed else layer.state_shapes(dtype)
        self.states = StatePages(shapes, name, vllm_config)
        self._form: Any = None

    def whole(self, x: Tensor, position_embeddings: PositionEmbeddings | None) -> Tensor:
        return self._call(MixerCacheLayer(), x, position_embeddings)

    def step(self, steps: dict[str, Any], x: Tensor, position_embeddings: PositionEmbeddings | None) -> Tensor:
        batch: StateBatch = steps[self.name]
        output = torch.zeros_like(x)
        if len(batch.tokens):
            self.states.clear(batch.new_pages)
            rows = tuple(part[0, batch.tokens, None] for part in position_embeddings or ())
            y = self._go_on(batch.pages, x[0, batch.tokens, None], rows or None, begins=False)
            output[0, batch.tokens] = y.squeeze(1)
        for part in batch.parts:
            output[:, part.first : part.last] = self._go_on(
                part.pages, *_of(part, x, position_embeddings), not part.seen
            )
        return output

    def _go_on(self, pages: Tensor, x: Tensor, position_embeddings: Any, begins: bool) -> Tensor:
        """The layer on x [B, T, hidden], with the states of the pages [B] before it, or none, and after it."""
        cache = MixerCacheLayer()
        if not begins:
            cache.state, cache.is_initialized = self.states.load(pages), True
        output = self._call(cache, x, position_embeddings)
        self.states.store(pages, cache.state)
        return output

    def _call(self, cache: MixerCacheLayer, x: Tensor, position_embeddings: PositionEmbeddings | None) -> Tensor:
        if self._form is None:  # the weights have been loaded
            self._form = FastMixer(self.layer, may_move=False) if isinstance(self.layer, Mixer) else self.layer
        output: Tensor = self._form(hidden_states=x, position_embeddings=position_embeddings, past_key_values=cache)[0]
        return output


def packed_shapes(layer: Any, dtype: torch.dtype) -> dict[str, TensorShape]:
    """The tensors that softmax attention with packed tokens keeps of a sequence of one group and a token."""
    shapes: dict[str, TensorShape] = layer.kept.shapes(
        layer.config.num_key_value_heads, layer.head_dim, GROUP + 1, dtype
    )
    return shapes


class PackedLayer(ServedLayer):
    """Softmax attention whose earlier keys and values are packed; the others are a state of constant size."""

    def __init__(self, layer: Any, name: str, vllm_config: VllmConfig) -> None:
        super().__init__(layer, name)
        shapes = packed_shapes(layer, vllm_config.model_config.dtype)
        packed = {tensor: TensorShape(shapes[tensor].shape[2:], shapes[tensor].dtype) for tensor in PACKED}
        exact = {tensor: shape for tensor, shape in shapes.items() if tensor not in PACKED}
        self.states = StatePages(exact, f"{name}.state", vllm_config)
        self.groups = PackedPages(packed, layer.config.num_key_value_heads, name, vllm_config)

    def whole(self, x: Tensor, position_embeddings: PositionEmbeddings | None) -> Tensor:
        output: Tensor = self.layer(hidden_states=x, position_embeddings=position_embeddings)[0]
        return output

    def step(self, steps: dict[str, Any], x: Tensor, position_embeddings: PositionEmbeddings | None) -> Tensor:
        batch: StateBatch = steps[self.states.name]
        held: TokenBatch = steps[self.name]
        output = torch.zeros_like(x)
        if len(batch.tokens):
            self.states.clear(batch.new_pages)
            rows = tuple(part[0, batch.tokens, None] for part in position_embeddings or ())
            y = self._go_on(batch.pages, *held.single, x[0, batch.tokens, None], rows or None)
            output[0, batch.tokens] = y.squeeze(1)
        for part in batch.parts:
            pages = held.several[part.first].pages[None]
            output[:, part.first : part.last] = self._go_on(
                part.pages, pages, part.seen, *_of(part, x, position_embeddings)
            )
        return output

    def _go_on(self, page: Tensor, pages: Tensor, seen: int, x: Tensor, position_embeddings: Any) -> Tensor:
        """The layer on x [B, T, hidden] after up to `seen` tokens, with the states of `page` [B] and packed `pages`."""
        length, kept, cache = x.shape[1], self.layer.kept, MixerCacheLayer()
        if seen or length == 1:
            cache.state, cache.is_initialized, cache.tokens_seen = self.states.load(page), True, seen
            groups = kept.groups(seen + 1) if length == 1 else kept.groups(seen)
            cache.state |= self.groups.load(pages, groups, cache.state["count"])
        output: Tensor = self.layer(hidden_states=x, position_embeddings=position_embeddings, past_key_values=cache)[0]
        self.states.store(page, cache.state)
        groups = kept.groups(seen + length)
        if length > 1:
            new = torch.arange(kept.groups(seen), groups, device=x.device)[None]
        else:  # the last one of each sequence, whether or not it is new
            new = ((cache.state["count"].long() - 1) // GROUP - 1).clamp_min(0)[:, None]
        if groups:
            self.groups.store(pages, new, cache.state)
        return output


class GrowingLayer(ServedLayer):
    """A kind of attention that keeps keys and values of all tokens, and may keep a state; one sequence at a time."""

    def __init__(self, layer: Any, name: str, vllm_config: VllmConfig) -> None:
        super().__init__(layer, name)
        dtype = vllm_config.model_config.dtype
        keys = layer.head_dim + layer.extra_channels(dtype)
        self.tokens = TokenPages(layer.growing_heads, keys, layer.head_dim, name, vllm_config)
        shapes = layer.state_shapes(dtype)
        self.states = StatePages(shapes, f"{name}.state", vllm_config) if shapes else None

    def whole(self, x: Tensor, position_embeddings: PositionEmbeddings | None) -> Tensor:
        output: Tensor = self.layer(hidden_states=x, position_embeddings=position_embeddings)[0]
        return output

    def step(self, steps: dict[str, Any], x: Tensor, position_embeddings: PositionEmbeddings | None) -> Tensor:
        output = torch.zeros_like(x)
        pages = _state_pages_of(steps[self.states.name]) if self.states is not None else {}
        for part in steps[self.name].parts:
            inputs = _of(part, x, position_embeddings)
            output[:, part.first : part.last] = self._go_on(part, pages.get(part.first), *inputs)
        return output

    def _go_on(self, part: SequencePart, page: Tensor | None, x: Tensor, position_embeddings: Any) -> Tensor:
        """The layer on the new tokens x [1, T, hidden] of a sequence, whose state is in `page` [1]."""
        index, cache = self.layer.layer_idx, DynamicCache()
        self.layer.place_cache(cache)
        if part.seen:
            cache.update(*self.tokens.load(part.pages, part.seen), index)
            if self.states is not None and page is not None:
                state: Any = cache.layers[index].parts["state"]  # type: ignore[attr-defined]
                state.state, state.is_initialized = self.states.load(page), True
        output: Tensor = self.layer(
            hidden_states=x,
            position_embeddings=position_embeddings,
            attention_mask=self._mask(part, x.device),
            past_key_values=cache,
        )[0]
        held: Any = cache.layers[index]
        grown = getattr(held, "growing", held)
        self.tokens.store(part.pages, part.seen, grown.keys[:, :, part.seen :], grown.values[:, :, part.seen :])
        if self.states is not None and page is not None:
            self.states.store(page, held.parts["state"].state)
        return output

    def _mask(self, part: SequencePart, device: torch.device) -> Tensor:
        """[1, 1, T, S] bool: the tokens that those of the part see, within the family's sliding window."""
        total = part.seen + part.last - part.first
        numbers = torch.arange(1, total + 1, device=device)[None]
        window = sliding_window(self.layer.config.whole, self.layer.layer_idx)
        return Tokens(numbers[:, part.seen :], None).sees(Tokens(numbers, None), total, 0, window)[:, None]


def _of(part: SequencePart, x: Tensor, position_embeddings: PositionEmbeddings | None) -> tuple[Tensor, Any]:
    """The part's tokens of x and of the position embeddings [1, T, ...]."""
    place = slice(part.first, part.last)
    if position_embeddings is None:
        return x[:, place], None
    return x[:, place], tuple(embedding[:, place] for embedding in position_embeddings)


def _state_pages_of(batch: StateBatch) -> dict[int, Tensor]:
    """The pages [1] of the sequences of a step, by the places of their first new tokens."""
    pages = {part.first: part.pages for part in batch.parts}
    return pages | dict(zip(batch.tokens.tolist(), batch.pages.unsqueeze(1), strict=True))
