"""The parts of vLLM's cache that converted layers use: a page per state, or pages of tokens."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec

from deltanet_hf.mixers.cache.state import State, TensorShape
from deltanet_hf.vllm_plugin.batch import StateBackend, TokenBackend
from deltanet_hf.vllm_plugin.pages import page_bytes, tensors_in


class StatePages(MambaBase):
    """The states of one layer, by page.

    Args:
        shapes: the tensors of a state.
        name: under which vLLM finds the cache, and the layer its part of a step.
        vllm_config: vLLM's settings.
    """

    kv_cache: tuple[Tensor, ...] = ()

    def __init__(self, shapes: dict[str, TensorShape], name: str, vllm_config: VllmConfig) -> None:
        self.shapes, self.name = shapes, name
        self.page_bytes = page_bytes(shapes)  # `set_page_bytes` makes it the model's largest
        self.tensors: State = {}
        vllm_config.compilation_config.static_forward_context[name] = self

    def load(self, pages: Tensor) -> State:
        """Copies of the states in the pages [B]."""
        return {name: tensor[pages] for name, tensor in self.tensors.items()}

    def store(self, pages: Tensor, state: State) -> None:
        """Put a state, which begins with the batch, into the pages [B]."""
        for name, tensor in self.tensors.items():
            tensor[pages] = state[name].to(tensor.dtype)

    def clear(self, pages: Tensor) -> None:
        """Put the state before the first token into the pages."""
        for tensor in self.tensors.values():
            tensor[pages] = 0

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.LINEAR

    def get_state_shape(self) -> Iterable[tuple[int, ...]]:
        return ((self.page_bytes,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.int8,)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return StateBackend

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take the pages [pages, 1, 1, bytes] int8 that vLLM has allocated."""
        pages = kv_cache.squeeze(dim=(1, 2))
        self.kv_cache = (pages,)
        self.tensors = tensors_in(pages, self.shapes)


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
        keys, values = kept.split([self.key_channels, self.value_channels], dim=-1)
        return keys, values

    def store(self, pages: Tensor, seen: int, keys: Tensor, values: Tensor) -> None:
        """Put keys and values [1, heads, T, channels] behind the first `seen` tokens of the sequence."""
        places = torch.arange(seen, seen + keys.shape[2], device=keys.device)
        size = self.kv_cache.shape[2]
        new = torch.cat([keys, values], dim=-1)[0].transpose(0, 1).to(self.kv_cache.dtype)
        self.kv_cache[pages[places // size], :, places % size] = new

    def get_attn_backend(self) -> type[AttentionBackend]:
        return TokenBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.heads,
            head_size=self.key_channels,
            head_size_v=self.value_channels,
            dtype=vllm_config.model_config.dtype,
        )


def state_pages(vllm_config: VllmConfig) -> list[StatePages]:
    """The states of all layers of the model that has been built with these settings."""
    caches = vllm_config.compilation_config.static_forward_context.values()
    return [cache for cache in caches if isinstance(cache, StatePages)]


def set_page_bytes(vllm_config: VllmConfig) -> None:
    """Give all layers pages of one size, as vLLM's allocator requires."""
    caches = state_pages(vllm_config)
    for cache in caches:
        cache.page_bytes = max(other.page_bytes for other in caches)
