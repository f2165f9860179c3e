"""Which tokens of a step of vLLM belong to which sequence, and where the sequence is kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import KVCacheSpec

from deltanet_kernels.packed_cache.layout import GROUP


@dataclass(frozen=True)
class Prompts:
    """New tokens that one call of a layer takes: of one sequence, or of neighbouring sequences that begin with them."""

    tokens: slice  # of the step
    sequences: slice  # of the step
    seen: int  # tokens of the sequence before them
    cu_seqlens: Tensor | None  # [N + 1] int32 boundaries of the sequences in these tokens, if there are several
    lengths: tuple[int, ...]  # of their new tokens


@dataclass(frozen=True)
class Step:
    """The sequences of a step and where they are kept.

    `pages` int32 are those of states [sequences], one per sequence, or those of tokens [sequences, pages], with `size`
    tokens each. A page is a row of the tensors that the operators change: steps take the pages of states as `slots`,
    and those of packed tokens as `pages`. Each of the first `singles` sequences has one new token, and one call takes
    these together; `prompts` have the others.
    """

    pages: Tensor
    size: int
    singles: int
    prompts: tuple[Prompts, ...]


class StepBuilder(AttentionMetadataBuilder[Step]):
    """Makes the `Step` of layers that keep something of every token.

    A CUDA graph of a step of single tokens reads `pages` where they were when it was recorded: in vLLM's own table, or
    in a tensor of the builder.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold: int | None = 1  # sequences with a single new token come first
    joins: ClassVar[bool] = True  # whether a call may take several sequences

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        step = common_attn_metadata
        pages = step.block_table_tensor[:, : -(-step.max_seq_len // self.kv_cache_spec.block_size)]
        return self.step(step, _lengths(step), pages)

    def step(self, step: CommonAttentionMetadata, totals: list[int], pages: Tensor) -> Step:
        """The step with these tokens of each sequence, the new ones included, and these pages."""
        starts = step.query_start_loc_cpu[: step.num_reqs + 1].tolist()
        new = [last - first for first, last in itertools.pairwise(starts)]
        seen = [total - count for total, count in zip(totals, new, strict=True)]
        singles = next((i for i, count in enumerate(new) if count > 1), len(new)) if self.joins else 0
        prompts = []
        for some in self._calls(seen, singles):
            lengths, cu_seqlens = tuple(new[some]), None
            if len(lengths) > 1:
                bounds = [0, *itertools.accumulate(lengths)]
                cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=pages.device)
            if any(lengths):  # others stand for no sequence
                tokens = slice(starts[some.start], starts[some.stop])
                prompts.append(Prompts(tokens, some, seen[some.start], cu_seqlens, lengths))
        return Step(pages, self.kv_cache_spec.block_size, singles, tuple(prompts))

    def _calls(self, seen: list[int], first: int) -> Iterator[slice]:
        """The sequences from `first` on, by the calls that take their prompts."""
        for begins, run in itertools.groupby(range(first, len(seen)), key=lambda index: seen[index] == 0):
            numbers = list(run)
            if begins and self.joins:
                yield slice(numbers[0], numbers[-1] + 1)
            else:
                yield from (slice(number, number + 1) for number in numbers)


class GrowingStepBuilder(StepBuilder):
    """The same for layers that take one sequence at a time."""

    _cudagraph_support = AttentionCGSupport.NEVER
    joins = False


class StateStepBuilder(StepBuilder):
    """The same for states, of which it clears the pages of sequences that begin with a single token."""

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.slots = torch.zeros(vllm_config.scheduler_config.max_num_seqs, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        step = common_attn_metadata
        mode = self.vllm_config.cache_config.mamba_cache_mode
        table = mamba_get_block_table_tensor(step.block_table_tensor, step.seq_lens, self.kv_cache_spec, mode)
        slots = self.slots[: step.num_reqs]
        slots.copy_(table[: step.num_reqs, 0])
        totals = _lengths(step)
        made = self.step(step, totals, slots)
        begin = [index for index, total in enumerate(totals[: made.singles]) if total == 1]
        if begin:
            caches: Any = self.vllm_config.compilation_config.static_forward_context
            for name in self.layer_names:
                caches[name].clear(made.pages[begin])
        return made


def _lengths(step: CommonAttentionMetadata) -> list[int]:
    """Tokens of each sequence, the new ones included."""
    totals: Any = step.seq_lens_cpu_upper_bound  # exact without speculative decoding
    return (step.seq_lens if totals is None else totals)[: step.num_reqs].tolist()  # type: ignore[no-any-return]


class StateBackend(AttentionBackend):
    """Names the builder for layers with states to vLLM."""

    @staticmethod
    def get_name() -> str:
        return "DELTANET_STATES"

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StateStepBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True


class TokenBackend(AttentionBackend):
    """Names the builder for layers that keep something of every token to vLLM."""

    @staticmethod
    def get_name() -> str:
        return "DELTANET_TOKENS"

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StepBuilder

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


class GrowingBackend(TokenBackend):
    """The same for layers that take one sequence at a time."""

    @staticmethod
    def get_name() -> str:
        return "DELTANET_GROWING"

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return GrowingStepBuilder
