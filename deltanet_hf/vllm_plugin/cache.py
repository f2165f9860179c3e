"""The parts of vLLM's cache that converted layers use: a page per state, or pages of tokens.

All pages of vLLM's have one size. So where layers keep little, several share a part of the cache (`share_pages`): one
of them is the host, by whose name vLLM knows it, and the others take that name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec

from deltanet_hf.mixers.cache.quantised_cache_spec import QuantisedCacheSpec
from deltanet_hf.mixers.cache.state import State, TensorShape
from deltanet_hf.vllm_plugin.batch import GrowingBackend, StateBackend, TokenBackend
from deltanet_hf.vllm_plugin.pages import bytes_of, in_order, page_bytes, shared, tensors_in

Pages = TypeVar("Pages")


class StatePages(MambaBase):
    """The states of one layer, by page, each from the byte `first` of the host's page on.

    Args:
        shapes: the tensors of a state.
        name: under which vLLM finds the cache, and the layer its part of a step.
        vllm_config: vLLM's settings.
    """

    kv_cache: Sequence[Tensor] = ()  # vLLM puts the pages [pages, bytes] int8 here

    def __init__(self, shapes: dict[str, TensorShape], name: str, vllm_config: VllmConfig) -> None:
        self.shapes, self.name = in_order(shapes), name
        self.size = self.shared_size = page_bytes(shapes)  # in bytes, its own and, of a host, that of all
        self.host, self.first = self, 0
        self._tensors: tuple[Any, State] = None, {}
        vllm_config.compilation_config.static_forward_context[name] = self

    @property
    def _own(self) -> Tensor:
        """[pages, bytes] int8."""
        return self.host.kv_cache[0][:, self.first : self.first + self.size]

    @property
    def tensors(self) -> State:
        """The tensors of all pages, each beginning with the pages."""
        if self._tensors[0] is not self.host.kv_cache:
            self._tensors = self.host.kv_cache, tensors_in(self._own, self.shapes)
        return self._tensors[1]

    def load(self, pages: Tensor) -> State:
        """Copies of the states in the pages [B]."""
        held = tensors_in(self._own[pages], self.shapes)
        return {name: tensor.contiguous() for name, tensor in held.items()}

    def store(self, pages: Tensor, state: State) -> None:
        """Put a state, which begins with the batch, into the pages [B]."""
        new = bytes_of(state, self.shapes)
        self._own[:, : new.shape[1]][pages] = new

    def copy(self, before: Tensor, after: Tensor) -> None:
        """Put the states in the pages `before` [B] into the pages `after` [B]."""
        pages = self._own
        pages[after] = pages[before]

    def clear(self, pages: Tensor) -> None:
        """Put the states before the first token, of all that share them, into the pages of a host."""
        self.kv_cache[0][pages] = 0

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.LINEAR

    def get_state_shape(self) -> Iterable[tuple[int, ...]]:
        return ((self.shared_size,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.int8,)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return StateBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """As in the base class; with packed tokens, in pages of their size."""
        spec: Any = super().get_kv_cache_spec(vllm_config)
        packed = packed_bytes(vllm_config)
        if not packed:
            return spec
        return dataclasses.replace(spec, page_size_padded=packed * vllm_config.cache_config.block_size)


class TokenPages(AttentionLayerBase):
    """Keys and values of all tokens in one layer, with further channels of the keys.

    Args:
        heads: key/value heads.
        key_channels, value_channels: per head.
        name, vllm_config: as in `StatePages`.
    """

    kv_cache: Tensor  # [pages, heads, tokens of a page, channels]

    def __init__(self, heads: int, key_channels: int, value_channels: int, name: str, vllm_config: VllmConfig) -> None:
        self.heads, self.key_channels, self.value_channels, self.name = heads, key_channels, value_channels, name
        vllm_config.compilation_config.static_forward_context[name] = self

    def load(self, pages: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """The first `tokens` keys and values [1, heads, tokens, channels] of the sequence in these pages."""
        kept = self.kv_cache[pages].transpose(0, 1).flatten(1, 2)[None, :, :tokens]
        return kept[..., : self.key_channels], kept[..., self.key_channels : self.key_channels + self.value_channels]

    def store(self, pages: Tensor, seen: int, keys: Tensor, values: Tensor) -> None:
        """Put keys and values [1, heads, T, channels] after the first `seen` tokens of the sequence."""
        places = torch.arange(seen, seen + keys.shape[2], device=keys.device)
        size = self.kv_cache.shape[2]
        new = torch.cat([keys, values], dim=-1)[0].transpose(0, 1).to(self.kv_cache.dtype)
        self.kv_cache[pages[places // size], :, places % size, : new.shape[-1]] = new

    def get_attn_backend(self) -> type[AttentionBackend]:
        return GrowingBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        half = -(-(self.key_channels + self.value_channels) // 2)  # vLLM 0.25 knows one size for both
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.heads,
            head_size=half,
            head_size_v=half,
            dtype=vllm_config.model_config.dtype,
        )


class PackedPages(AttentionLayerBase):
    """The packed groups of 32 tokens of one layer; a page holds whole groups, behind those of `first` bytes per token.

    Args:
        shapes: the tensors of one group of one head (`QuantisedCacheSpec.group_shapes`).
        heads: key/value heads.
        name, vllm_config: as in `StatePages`.
    """

    kv_cache: Tensor  # [pages, 1, tokens of a page, bytes of a token] int8

    def __init__(self, shapes: dict[str, TensorShape], heads: int, name: str, vllm_config: VllmConfig) -> None:
        # Of all heads and groups of a page, they have the same order.
        self.shapes, self.heads, self.name = in_order(shapes), heads, name
        group = heads * sum(shape.nbytes for shape in shapes.values())
        # Of a token, as in `StatePages`; even, because vLLM counts halves.
        self.size = self.shared_size = -(-group // (2 * QuantisedCacheSpec.group_size)) * 2
        self.host, self.first = self, 0
        self._tensors: tuple[Any, State] = None, {}
        vllm_config.compilation_config.static_forward_context[name] = self

    @property
    def _groups(self) -> int:
        """Of a page."""
        return self.host.kv_cache.shape[2] // QuantisedCacheSpec.group_size

    @property
    def tensors(self) -> State:
        """The tensors of all pages, each [pages, heads, groups of a page, ...]."""
        cache = self.host.kv_cache
        if self._tensors[0] is not cache:
            first, last = (count * cache.shape[2] for count in (self.first, self.first + self.size))
            shapes = {
                name: TensorShape((self.heads, self._groups, *shape.shape), shape.dtype)
                for name, shape in self.shapes.items()
            }
            self._tensors = cache, tensors_in(cache.view(len(cache), -1)[:, first:last], shapes)
        return self._tensors[1]

    def load(self, pages: Tensor, groups: int) -> State:
        """Copies [1, heads, groups, ...] of the first groups of the sequence in the pages [1, P]."""
        held = pages[0, : -(-groups // self._groups)].long()
        return {
            name: tensor[held].transpose(0, 1).flatten(1, 2)[None, :, :groups] for name, tensor in self.tensors.items()
        }

    def store(self, pages: Tensor, new: slice, state: State) -> None:
        """Put the `new` groups of a state of all groups into the pages [B, P], but for those that it has not yet."""
        group = torch.arange(new.start, new.stop, device=pages.device).expand(len(pages), -1)
        page = pages.long().gather(1, group // self._groups)
        complete = (state["count"].long()[:, None] - 1) // QuantisedCacheSpec.group_size
        page = page * (group < complete)  # vLLM leaves page 0 empty
        place = group % self._groups
        for name, tensor in self.tensors.items():
            tensor[page, :, place] = state[name][:, :, new].transpose(1, 2)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return TokenBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        half = packed_bytes(vllm_config) // 2
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=half,
            head_size_v=half,
            dtype=torch.int8,
        )


def packed_bytes(vllm_config: VllmConfig) -> int:
    """Bytes of a token in the pages of a model with packed tokens, of all layers; 0 for other models."""
    return max((cache.shared_size for cache in _caches(vllm_config, PackedPages)), default=0)


def state_page_bytes(vllm_config: VllmConfig) -> int:
    """Bytes of a page of states of the model that has been built with these settings; 0 for one without states."""
    return max((cache.shared_size for cache in _caches(vllm_config, StatePages)), default=0)


def _caches(vllm_config: VllmConfig, kind: type[Pages]) -> list[Pages]:
    """The parts of vLLM's cache that are of this kind."""
    caches = vllm_config.compilation_config.static_forward_context.values()
    return [cache for cache in caches if isinstance(cache, kind)]


STATE_GROUPS = 4  # of pages of states beside packed tokens: vLLM's host takes time for each, in every step


def share_pages(vllm_config: VllmConfig) -> None:
    """Divide vLLM's pages, which have one size, among the layers.

    Pages of states are as large as the largest state, beside packed tokens at least a quarter of all states, whose
    pages hold the tokens of all layers.
    """
    states, packed = _caches(vllm_config, StatePages), _caches(vllm_config, PackedPages)
    sizes, tokens = ([cache.size for cache in caches] for caches in (states, packed))
    _share(states, shared(sizes, sum(sizes) // STATE_GROUPS if packed else 0), vllm_config)
    _share(packed, shared(tokens, sum(tokens)), vllm_config)


def _share(caches: Sequence[StatePages | PackedPages], places: list[tuple[int, int]], vllm_config: VllmConfig) -> None:
    """Give the caches these places, see `shared`."""
    hosts: dict[int, Any] = {}
    for cache, (page, first) in zip(caches, places, strict=True):
        cache.host, cache.first = hosts.setdefault(page, cache), first
        if cache is not cache.host:
            del vllm_config.compilation_config.static_forward_context[cache.name]
            cache.name = cache.host.name
    for host in hosts.values():
        host.shared_size = max(cache.first + cache.size for cache in caches)
