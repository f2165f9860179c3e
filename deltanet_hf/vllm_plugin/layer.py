"""Converted layers in vLLM: the project's own modules, with what they keep in vLLM's cache."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context

from deltanet_hf.fast.decoder import fast_mixer
from deltanet_hf.fast.packed import FastPacked, is_packed
from deltanet_hf.mixers.attention.family_attention import kind_of
from deltanet_hf.mixers.attention.routed_config import RoutedConfig
from deltanet_hf.mixers.cache.state import MixerCacheLayer, State
from deltanet_hf.mixers.cache.window_cache import Tokens
from deltanet_hf.mixers.layer.layer_call import CacheView
from deltanet_hf.mixers.layer.layer_kind import PositionEmbeddings
from deltanet_hf.mixers.layer.masks import sliding_window
from deltanet_hf.vllm_plugin.batch import Prompts, SpecTokens, Step
from deltanet_hf.vllm_plugin.cache import PackedPages, StatePages, TokenPages


def served(layer: Any, name: str, vllm_config: VllmConfig) -> ServedLayer:
    """The module that stands in a decoder for a converted layer.

    Args:
        layer: the layer.
        name: its name in the model, under which it stays.
        vllm_config: vLLM's settings.
    """
    kind: Any = PackedLayer if layer.cache_class.grows else GrowingLayer if layer.growing_heads else StateLayer
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
            output = self.compute(steps, hidden_states, position_embeddings)
        return output if self.alone else (output, None)

    @property
    def leading(self) -> str:
        """Name of the cache whose step says which tokens a call takes."""
        return self.name

    @cached_property
    def form(self) -> Any:
        """The fast form of a mixer or of packed keys, or the layer itself; made once the weights have been loaded."""
        if kind_of(self.layer).has_state:
            return fast_mixer(self.layer, may_move=True)
        return FastPacked(self.layer, may_move=True) if is_packed(self.layer) else self.layer

    def compute(self, steps: dict[str, Step], x: Tensor, position_embeddings: PositionEmbeddings | None) -> Tensor:
        """The layer on all tokens x [1, T, hidden] of a step; `steps` has their sequences, by names of caches."""
        step = steps[self.leading]
        outputs: list[tuple[slice | Tensor, Tensor]] = []
        if step.num_decodes:
            tokens = slice(0, step.num_decodes)
            outputs.append((tokens, self._rows(steps, x, position_embeddings, tokens)))
        for draft in step.drafts:
            outputs.append((draft.tokens, self._rows(self.drafted(steps, draft), x, position_embeddings, draft.tokens)))
        for prompts in step.prompts:
            angles = None if position_embeddings is None else [part[:, prompts.tokens] for part in position_embeddings]
            outputs.append((prompts.tokens, self.several_tokens(steps, prompts, x[:, prompts.tokens], angles)))
        if len(outputs) == 1 and not step.drafts:
            return outputs[0][1]
        together = torch.empty_like(x)
        for places, output in outputs:
            together[:, places] = output
        return together

    def _rows(
        self, steps: dict[str, Step], x: Tensor, position_embeddings: PositionEmbeddings | None, tokens: slice | Tensor
    ) -> Tensor:
        """The layer on these tokens [1, B, hidden] of a step, each of a sequence of its own."""
        angles = None if position_embeddings is None else [part[0, tokens, None] for part in position_embeddings]
        return self.one_token(steps, x[0, tokens, None], angles).transpose(0, 1)

    @abstractmethod
    def whole(self, x: Tensor, position_embeddings: PositionEmbeddings | None) -> Tensor:
        """The layer on one sequence x [1, T, hidden], of which nothing is kept."""

    def one_token(self, steps: dict[str, Step], x: Tensor, position_embeddings: Any) -> Tensor:
        """The layer on the tokens x [B, 1, hidden] of the first B sequences of the step."""
        raise NotImplementedError

    def drafted(self, steps: dict[str, Step], draft: SpecTokens) -> dict[str, Step]:
        """The steps for `one_token` on some drafts, whose states are copied to the pages that they will change."""
        raise NotImplementedError

    @abstractmethod
    def several_tokens(self, steps: dict[str, Step], prompts: Prompts, x: Tensor, position_embeddings: Any) -> Tensor:
        """The layer on the tokens x [1, T, hidden] of some prompts of the step."""


def cache_for(prompts: Prompts, state: Callable[[], State]) -> CacheView:
    """A layer's part of a cache for the prompts, with the state before them."""
    cache = MixerCacheLayer()
    if prompts.seen:
        cache.state, cache.is_initialized, cache.tokens_seen = state(), True, prompts.seen
    return CacheView(cache, lengths=None if prompts.cu_seqlens is None else prompts.lengths)


class StateLayer(ServedLayer):
    """A layer with a state of constant size: a mixer, or softmax attention under a window."""

    def __init__(self, layer: Any, name: str, vllm_config: VllmConfig) -> None:
        super().__init__(layer, name)
        self.states = StatePages(layer.state_shapes(vllm_config.model_config.dtype), name, vllm_config)

    @property
    def leading(self) -> str:
        return self.states.name

    def whole(self, x: Tensor, position_embeddings: PositionEmbeddings | None) -> Tensor:
        return called(self.form, MixerCacheLayer(), x, position_embeddings)

    def one_token(self, steps: dict[str, Step], x: Tensor, position_embeddings: Any) -> Tensor:
        pages, cache = steps[self.leading].pages[: len(x)], MixerCacheLayer()
        cache.is_initialized = True
        if self.form.has_step:
            cache.state = self.states.tensors
            return called(self.form, CacheView(cache, pages), x, position_embeddings)
        cache.state = self.states.load(pages)
        output = called(self.form, cache, x, position_embeddings)
        self.states.store(pages, cache.state)
        return output

    def drafted(self, steps: dict[str, Step], draft: SpecTokens) -> dict[str, Step]:
        self.states.copy(draft.before, draft.after)
        return {self.leading: replace(steps[self.leading], pages=draft.after)}

    def several_tokens(self, steps: dict[str, Step], prompts: Prompts, x: Tensor, position_embeddings: Any) -> Tensor:
        pages = steps[self.leading].pages[prompts.sequences]
        cache = cache_for(prompts, lambda: self.states.load(pages))
        output = called(self.form, cache, x, position_embeddings, cu_seq_lens_q=prompts.cu_seqlens)
        self.states.store(pages, cache.layer.state)
        return output


class PackedLayer(ServedLayer):
    """Softmax attention whose earlier keys and values are packed; the others are a state of constant size."""

    def __init__(self, layer: Any, name: str, vllm_config: VllmConfig) -> None:
        super().__init__(layer, name)
        group = layer.cache_spec.group_shapes(layer.head_dim)
        shapes = layer.state_shapes(vllm_config.model_config.dtype)
        others = {tensor: shape for tensor, shape in shapes.items() if tensor not in group}
        self.states = StatePages(others, f"{name}.state", vllm_config)
        self.groups = PackedPages(group, layer.config.num_key_value_heads, name, vllm_config)

    @property
    def leading(self) -> str:
        return self.states.name

    def whole(self, x: Tensor, position_embeddings: PositionEmbeddings | None) -> Tensor:
        return called(self.form, None, x, position_embeddings)

    def one_token(self, steps: dict[str, Step], x: Tensor, position_embeddings: Any) -> Tensor:
        slots, pages = (steps[kept.name].pages[: len(x)] for kept in (self.states, self.groups))
        cache = MixerCacheLayer()
        cache.state, cache.is_initialized = self.groups.tensors | self.states.tensors, True
        return called(self.form, CacheView(cache, slots, pages), x, position_embeddings)

    def drafted(self, steps: dict[str, Step], draft: SpecTokens) -> dict[str, Step]:
        self.states.copy(draft.before, draft.after)
        states, groups = steps[self.states.name], steps[self.groups.name]
        return {
            self.states.name: replace(states, pages=draft.after),
            self.groups.name: replace(groups, pages=groups.pages[draft.sequences]),
        }

    def several_tokens(self, steps: dict[str, Step], prompts: Prompts, x: Tensor, position_embeddings: Any) -> Tensor:
        page, pages = (steps[cache.name].pages[prompts.sequences] for cache in (self.states, self.groups))
        spec, seen = self.layer.cache_spec, prompts.seen

        def before() -> State:
            return self.states.load(page) | self.groups.load(pages, spec.groups(seen))

        cache = cache_for(prompts, before)
        output = called(self.form, cache, x, position_embeddings, cu_seq_lens_q=prompts.cu_seqlens)
        state = cache.layer.state
        self.states.store(page, state)
        self.groups.store(pages, slice(spec.groups(seen), spec.groups(seen + max(prompts.lengths))), state)
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
        return called(self.layer, None, x, position_embeddings)

    def several_tokens(self, steps: dict[str, Step], prompts: Prompts, x: Tensor, position_embeddings: Any) -> Tensor:
        step, seen = steps[self.name], prompts.seen
        pages = step.pages[prompts.sequences][0, : -(-(seen + x.shape[1]) // step.size)]
        index, cache = self.layer.layer_idx, DynamicCache()
        self.layer.place_cache(cache)
        if seen:
            cache.update(*self.tokens.load(pages, seen), index)
            if self.states is not None:
                page = steps[self.states.name].pages[prompts.sequences]
                state: Any = cache.layers[index].parts["state"]  # type: ignore[attr-defined]
                state.state, state.is_initialized = self.states.load(page), True
        output = called(self.layer, cache, x, position_embeddings, attention_mask=self._mask(x, seen))
        held: Any = cache.layers[index]
        grown = getattr(held, "growing", held)
        self.tokens.store(pages, seen, grown.keys[:, :, seen:], grown.values[:, :, seen:])
        if self.states is not None:
            self.states.store(steps[self.states.name].pages[prompts.sequences], held.parts["state"].state)
        return output

    def _mask(self, x: Tensor, seen: int) -> Tensor:
        """[1, 1, T, S] bool: the tokens that those of x [1, T, hidden] see, within the family's sliding window."""
        total = seen + x.shape[1]
        numbers = torch.arange(1, total + 1, device=x.device)[None]
        window = sliding_window(self.layer.config.whole, self.layer.layer_idx)
        return Tokens(numbers[:, seen:], None).sees(Tokens(numbers, None), total, 0, window)[:, None]


def called(layer: Any, cache: Any, x: Tensor, position_embeddings: Any, **options: Any) -> Tensor:
    """A layer on x [B, T, hidden]; the cache has its states before the call and after it."""
    options |= {"position_embeddings": position_embeddings, "past_key_values": cache}
    output: Tensor | tuple[Tensor, None] = layer(hidden_states=x, **options)
    return output if isinstance(output, Tensor) else output[0]
