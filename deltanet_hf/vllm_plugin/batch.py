"""Which tokens of a step of vLLM belong to which sequence, and where the sequence is kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import KVCacheSpec

from deltanet_hf.mixers.cache.quantised_cache_spec import QuantisedCacheSpec


@dataclass(frozen=True)
class Prompts:
    """New tokens that one call of a layer takes: of one sequence, or of neighbouring sequences that begin with them."""

    tokens: slice  # of the step
    sequences: slice  # of the step
    seen: int  # tokens of the sequence before them
    cu_seqlens: Tensor | None  # [N + 1] int32 boundaries of the sequences in these tokens, if there are several
    lengths: tuple[int, ...]  # of their new tokens


@dataclass(frozen=True)
class SpecTokens:
    """One token of each of some sequences, in speculative decoding, where the last new tokens may be rejected.

    The state after each token has a page of its own, so that the next step can go on from any of them.
    """

    sequences: Tensor  # [B] of the step
    tokens: Tensor  # [B] of the step
    before: Tensor  # [B] int32 pages of the states before these tokens
    after: Tensor  # [B] int32 pages of the states after them


@dataclass(frozen=True)
class Step:
    """The sequences of a step and where they are kept.

    `pages` int32 are those of states [sequences], one per sequence, or those of tokens [sequences, pages], with `size`
    tokens each. A page is a row of the tensors that the operators change: steps take the pages of states as
    `state_indices`, and those of packed tokens as `pages`. Each of the first `num_decodes` sequences has one new token,
    and one call has these together; `prompts` have the others. In speculative decoding `drafts` have all sequences that
    are continued, token by token; only the steps of states know them.
    """

    pages: Tensor
    size: int
    num_decodes: int
    prompts: tuple[Prompts, ...]
    drafts: tuple[SpecTokens, ...] = ()


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
        return self.step(_starts(step), _lengths(step), pages)

    def step(self, starts: list[int], totals: list[int], pages: Tensor, prompted: Sequence[int] | None = None) -> Step:
        """The step of sequences whose new tokens begin at `starts`, with all their tokens, these included, and pages.

        Args:
            prompted: in speculative decoding, the sequences that are read as prompts; `num_decodes` is 0 then.
        """
        new = [last - first for first, last in itertools.pairwise(starts)]
        seen = [total - count for total, count in zip(totals, new, strict=True)]
        num_decodes = 0
        if prompted is None:
            num_decodes = next((i for i, count in enumerate(new) if count > 1), len(new)) if self.joins else 0
            prompted = range(num_decodes, len(new))
        prompts = []
        for some in self._calls(seen, prompted):
            lengths, cu_seqlens = tuple(new[some]), None
            if len(lengths) > 1:
                bounds = [0, *itertools.accumulate(lengths)]
                cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=pages.device)
            if any(lengths):  # others stand for no sequence
                tokens = slice(starts[some.start], starts[some.stop])
                prompts.append(Prompts(tokens, some, seen[some.start], cu_seqlens, lengths))
        return Step(pages, self.kv_cache_spec.block_size, num_decodes, tuple(prompts))

    def _calls(self, seen: list[int], sequences: Sequence[int]) -> Iterator[slice]:
        """Some of the sequences, by the calls that take their prompts."""
        places = enumerate(sequences)
        for (begins, _), run in itertools.groupby(places, key=lambda place: (seen[place[1]] == 0, place[1] - place[0])):
            numbers = [number for _, number in run]
            if begins and self.joins:
                yield slice(numbers[0], numbers[-1] + 1)
            else:
                yield from (slice(number, number + 1) for number in numbers)


class GrowingStepBuilder(StepBuilder):
    """The same for layers that take one sequence at a time."""

    _cudagraph_support = AttentionCGSupport.NEVER
    joins = False


class StateStepBuilder(StepBuilder, GDNAttentionMetadataBuilder):
    """The same for states, of which it clears the pages of sequences that begin with a single token or with drafts.

    vLLM tells builders of Gated DeltaNet how many drafts are new and were accepted; the rest of that class is not used.
    """

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
        sequences = vllm_config.scheduler_config.max_num_seqs
        self.slots = torch.zeros(sequences, dtype=torch.int32, device=device)
        self.drafting = vllm_config.speculative_config is not None
        self.accepted = torch.ones_like(self.slots)

    def build(  # type: ignore[override]
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: Tensor | None = None,
        num_decode_draft_tokens_cpu: Tensor | None = None,
        fast_build: bool = False,
    ) -> Step:
        step = common_attn_metadata
        mode = self.vllm_config.cache_config.mamba_cache_mode
        table = mamba_get_block_table_tensor(step.block_table_tensor, step.seq_lens, self.kv_cache_spec, mode)
        slots = self.slots[: step.num_reqs]
        slots.copy_(table[: step.num_reqs, 0])
        starts, totals = _starts(step), _lengths(step)
        if self.drafting:
            if num_accepted_tokens is not None:  # vLLM 0.25 passes its tensor in steps with new drafts only
                self.accepted = num_accepted_tokens.as_strided((len(self.slots),), (1,))
            counts = [0] * len(totals) if num_decode_draft_tokens_cpu is None else num_decode_draft_tokens_cpu.tolist()
            new = [last - first for first, last in itertools.pairwise(starts)]
            alone = [index for index, count in enumerate(new) if count == 1 or counts[index] > 0]
            prompted = sorted(set(range(len(new))).difference(alone))
            made = self.step(starts, totals, slots, prompted)
            made = replace(made, drafts=_drafts(starts, alone, table, self.accepted))
        else:
            made = self.step(starts, totals, slots)
            alone = list(range(made.num_decodes))
        begin = [index for index in alone if totals[index] == starts[index + 1] - starts[index] > 0]
        if begin:
            caches: Any = self.vllm_config.compilation_config.static_forward_context
            for name in self.layer_names:
                caches[name].clear(slots[begin])
        return made

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Step:
        return self.build(0, common_attn_metadata)


def _drafts(starts: list[int], drafted: list[int], table: Tensor, accepted: Tensor) -> tuple[SpecTokens, ...]:
    """The new tokens of these sequences, first ones first.

    Args:
        starts: of the new tokens of all sequences, and their end.
        table: [sequences, 1 + drafts at most] int32, the pages of states.
        accepted: [sequences] tokens of the step before that stayed; the state is in the page of the last of them.
    """
    made = []
    for place in range(table.shape[1]):
        drafted = [index for index in drafted if starts[index + 1] - starts[index] > place]
        if not drafted:
            break
        rows, tokens = torch.tensor([drafted, [starts[index] + place for index in drafted]], device=table.device)
        before = accepted[rows] - 1 if place == 0 else torch.full_like(rows, place - 1)
        made.append(SpecTokens(rows, tokens, table[rows, before], table[rows, place]))
    return tuple(made)


def _starts(step: CommonAttentionMetadata) -> list[int]:
    """Where the new tokens of each sequence begin, and where the last ones end."""
    return step.query_start_loc_cpu[: step.num_reqs + 1].tolist()  # type: ignore[no-any-return]


def _lengths(step: CommonAttentionMetadata) -> list[int]:
    """Tokens of each sequence, the new ones included."""
    totals: Any = step.seq_lens_cpu_upper_bound  # exact, because drafts by n-grams wait for the step before
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
        return [MultipleOf(QuantisedCacheSpec.group_size)]


class GrowingBackend(TokenBackend):
    """The same for layers that take one sequence at a time."""

    @staticmethod
    def get_name() -> str:
        return "DELTANET_GROWING"

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return GrowingStepBuilder
