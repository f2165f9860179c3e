"""A converted layer in vLLM: the project's own module, with its states in pages of vLLM's cache."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from deltanet_hf.mixers.layer_kind import PositionEmbeddings
from deltanet_hf.mixers.routed_config import RoutedConfig
from deltanet_hf.mixers.state import MixerCacheLayer, State
from deltanet_hf.mixers.window import WindowAttention
from deltanet_hf.mixers.window_softmax import IMPLEMENTATION
from deltanet_hf.vllm_plugin.batch import Batch, StateBackend
from deltanet_hf.vllm_plugin.pages import page_bytes, tensors_in


class ServedLayer(nn.Module, MambaBase):
    """Stands in a decoder layer for the mixer or the window that it calls.

    Args:
        mixer: a layer with a state of constant size.
        returns_pair: whether the decoder layer expects (output, weights), as of `self_attn`, or the output alone.
        prefix: the module's name, by which vLLM knows its cache.
        vllm_config: vLLM's settings.
    """

    kv_cache: tuple[Tensor, ...] = ()

    def __init__(self, mixer: Any, returns_pair: bool, prefix: str, vllm_config: VllmConfig) -> None:
        super().__init__()
        if isinstance(mixer, WindowAttention):
            mixer.config = RoutedConfig(_with_masks(mixer.config), IMPLEMENTATION)  # type: ignore[attr-defined]
        self.mixer, self.returns_pair, self.prefix = mixer, returns_pair, prefix
        self.shapes = mixer.state_shapes(vllm_config.model_config.dtype)
        self.page_bytes = page_bytes(self.shapes)  # `set_page_bytes` makes it the model's largest
        self.state: State = {}
        vllm_config.compilation_config.static_forward_context[prefix] = self

    # What vLLM's cache asks.

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
        self.state = tensors_in(pages, self.shapes)

    # What the decoder layer calls.

    def forward(
        self, hidden_states: Tensor, position_embeddings: PositionEmbeddings | None = None, **kwargs: Any
    ) -> Any:
        """hidden_states [1, T, hidden] of all tokens of a step -> the same, alone or with None."""
        steps: Any = get_forward_context().attn_metadata
        if steps is None:  # vLLM measures the memory that a step needs
            output = self._call(MixerCacheLayer(), hidden_states, position_embeddings)
        else:
            output = self._compute(steps[self.prefix], hidden_states, position_embeddings)
        return (output, None) if self.returns_pair else output

    def _compute(self, batch: Batch, x: Tensor, position_embeddings: PositionEmbeddings | None) -> Tensor:
        output = torch.zeros_like(x)
        if len(batch.tokens):
            for tensor in self.state.values():
                tensor[batch.new_pages] = 0  # the state before the first token
            rows = _rows(x, position_embeddings, batch.tokens)
            output[0, batch.tokens] = self._go_on(batch.pages, *rows).squeeze(1)
        for chunk in batch.chunks:
            part = slice(chunk.first, chunk.last)
            embeddings = None if position_embeddings is None else tuple(e[:, part] for e in position_embeddings)
            output[:, part] = self._go_on(chunk.page, x[:, part], embeddings, chunk.begins)
        return output

    def _go_on(self, pages: Tensor, x: Tensor, position_embeddings: Any, begins: bool = False) -> Tensor:
        """The layer on x [B, T, hidden], with the states of the pages [B] before and after it."""
        cache = MixerCacheLayer()
        if not begins:
            cache.state = {name: tensor[pages] for name, tensor in self.state.items()}
            cache.is_initialized = True
        output = self._call(cache, x, position_embeddings)
        for name, tensor in self.state.items():
            tensor[pages] = cache.state[name].to(tensor.dtype)
        return output

    def _call(self, cache: MixerCacheLayer, x: Tensor, position_embeddings: PositionEmbeddings | None) -> Tensor:
        output: Tensor = self.mixer.call_on(cache, x, position_embeddings, None)
        return output


def set_page_bytes(layers: list[ServedLayer]) -> None:
    """Give the layers of a model pages of one size, as vLLM's allocator requires."""
    largest = max((layer.page_bytes for layer in layers), default=0)
    for layer in layers:
        layer.page_bytes = largest


def _rows(
    x: Tensor, position_embeddings: PositionEmbeddings | None, tokens: Tensor
) -> tuple[Tensor, PositionEmbeddings | None]:
    """Single tokens of x [1, T, hidden] as a batch [n, 1, hidden], with their position embeddings."""
    if position_embeddings is None:
        return x[0, tokens, None], None
    cos, sin = position_embeddings
    return x[0, tokens, None], (cos[0, tokens, None], sin[0, tokens, None])


def _with_masks(config: Any) -> Any:
    """A family's configuration whose attention is not vLLM's."""
    whole = copy.copy(config.whole)
    whole._attn_implementation = "sdpa"
    return whole
