"""Which tokens of a step of vLLM belong to which sequence, and where the sequence is kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import KVCacheSpec

from deltanet_kernels.packed_cache.layout import GROUP


@dataclass(frozen=True)
class SequencePart:
    """The new tokens of one sequence: a prompt, a part of it, or the token that was generated last."""

    first: int  # place in the step
    last: int  # exclusive
    seen: int  # tokens of the sequence before them
    pages: Tensor  # int64: [1], the page of its state; or [pages], those of its tokens


@dataclass(frozen=True)
class StateBatch:
    """A step for layers with states.

    `tokens` and `pages` ([n] int64) are the places and pages of the sequences with a single new token, which one call
    computes together; `new_pages` are the pages of those of them that begin here.
    """

    tokens: Tensor
    pages: Tensor
    new_pages: Tensor
    parts: tuple[SequencePart, ...]  # with several tokens


class StateBatchBuilder(AttentionMetadataBuilder[StateBatch]):
    """Makes the `StateBatch` of every step."""

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.cache_mode = vllm_config.cache_config.mamba_cache_mode

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StateBatch:
        step = common_attn_metadata
        table = mamba_get_block_table_tensor(
            step.block_table_tensor, step.seq_lens, self.kv_cache_spec, self.cache_mode
        )
        single: list[tuple[int, int]] = []
        begin: list[int] = []
        several: list[SequencePart] = []
        pages: Tensor = table[:, 0].long()
        for index, first, last, seen in _sequences(step):
            if last - first > 1:
                several.append(SequencePart(first, last, seen, pages[index : index + 1]))
                continue
            single.append((index, first))
            if seen == 0:
                begin.append(index)
        rows = torch.tensor(single, dtype=torch.long, device=pages.device).view(-1, 2)
        new_pages = pages[torch.tensor(begin, dtype=torch.long, device=pages.device)]
        return StateBatch(rows[:, 1], pages[rows[:, 0]], new_pages, tuple(several))


@dataclass(frozen=True)
class TokenBatch:
    """A step for layers that keep something of every token.

    `table` ([sequences, pages] int64) has the pages of all sequences, each with `size` tokens; `sequences` are those
    with new tokens, as `_sequences` gives them.
    """

    table: Tensor
    size: int
    sequences: tuple[tuple[int, int, int, int], ...]

    def part(self, index: int, first: int, last: int, seen: int) -> SequencePart:
        """One of `sequences` with its pages."""
        return SequencePart(first, last, seen, self.table[index, : -(-(seen + last - first) // self.size)])

    @cached_property
    def parts(self) -> tuple[SequencePart, ...]:
        """All `sequences` with their pages."""
        return tuple(self.part(*sequence) for sequence in self.sequences)

    @cached_property
    def several(self) -> dict[int, SequencePart]:
        """The parts with several new tokens, by the places of the first."""
        return {item[1]: self.part(*item) for item in self.sequences if item[2] - item[1] > 1}

    @cached_property
    def single(self) -> tuple[Tensor, int]:
        """Pages [n, pages] of the sequences with a single new token, and the most tokens that one has before it."""
        rows = [(index, seen) for index, first, last, seen in self.sequences if last - first == 1]
        most = max((seen for _, seen in rows), default=0)
        chosen = torch.tensor([index for index, _ in rows], dtype=torch.long, device=self.table.device)
        return self.table[chosen, : most // self.size + 1], most


class TokenBatchBuilder(AttentionMetadataBuilder[TokenBatch]):
    """Makes the `TokenBatch` of every step."""

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TokenBatch:
        step = common_attn_metadata
        return TokenBatch(step.block_table_tensor.long(), self.kv_cache_spec.block_size, tuple(_sequences(step)))


def _sequences(step: CommonAttentionMetadata) -> Iterator[tuple[int, int, int, int]]:
    """Row of the sequence, place of its first new token and behind its last, and tokens before them."""
    lengths: Any = step.seq_lens_cpu_upper_bound  # exact without speculative decoding
    totals = (step.seq_lens if lengths is None else lengths).tolist()
    for index, (first, last) in enumerate(itertools.pairwise(step.query_start_loc_cpu.tolist())):
        if last > first:
            yield index, first, last, totals[index] - (last - first)


class StateBackend(AttentionBackend):
    """Names the builder for layers with states to vLLM."""

    @staticmethod
    def get_name() -> str:
        return "DELTANET_STATES"

    @staticmethod
    def get_builder_cls() -> type[StateBatchBuilder]:
        return StateBatchBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True


class TokenBackend(AttentionBackend):
    """Names the builder for layers that keep something of every token to vLLM."""

    @staticmethod
    def get_name() -> str:
        return "DELTANET_TOKENS"

    @staticmethod
    def get_builder_cls() -> type[TokenBatchBuilder]:
        return TokenBatchBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[pages, heads, tokens of a page, channels of key and value]; newer versions of vLLM do not ask."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_supported_kernel_block_sizes(spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """Whole groups of packed tokens."""
        return [MultipleOf(GROUP)]
