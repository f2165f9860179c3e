"""Which tokens of a step of vLLM belong to which state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass(frozen=True)
class Chunk:
    """Several tokens of one sequence: a prompt or a part of it."""

    first: int
    last: int  # exclusive
    page: Tensor  # [1] int64
    begins: bool  # whether the sequence begins here


@dataclass(frozen=True)
class Batch:
    """The tokens of a step.

    `tokens` and `pages` ([n] int64) are the places and pages of the sequences with a single new token, which one call
    computes together, and `new_pages` the pages of those of them that begin here.
    """

    tokens: Tensor
    pages: Tensor
    new_pages: Tensor
    chunks: tuple[Chunk, ...]


class StateBackend(AttentionBackend):
    """Names the builder of `Batch` to vLLM."""

    @staticmethod
    def get_name() -> str:
        return "DELTANET_STATE"

    @staticmethod
    def get_builder_cls() -> type[BatchBuilder]:
        return BatchBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True


class BatchBuilder(AttentionMetadataBuilder[Batch]):
    """Makes the `Batch` of every step; steps are not captured in CUDA graphs."""

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.cache_mode = vllm_config.cache_config.mamba_cache_mode

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Batch:
        step = common_attn_metadata
        table: Tensor = mamba_get_block_table_tensor(
            step.block_table_tensor, step.seq_lens, self.kv_cache_spec, self.cache_mode
        )
        pages = table[:, 0].long()
        starts = step.query_start_loc_cpu.tolist()
        lengths: Any = step.seq_lens_cpu_upper_bound  # exact without speculative decoding
        totals = (step.seq_lens if lengths is None else lengths).tolist()
        single, begin, chunks = [], [], []
        for index, (first, last) in enumerate(zip(starts, starts[1:], strict=False)):
            begins = totals[index] == last - first
            if last - first == 1:
                single.append(index)
                begin += [index] if begins else []
            elif last > first:
                chunks.append(Chunk(first, last, pages[index : index + 1], begins))
        tokens = torch.tensor([starts[index] for index in single], dtype=torch.long, device=pages.device)
        return Batch(tokens, _chosen(pages, single), _chosen(pages, begin), tuple(chunks))


def _chosen(pages: Tensor, indices: list[int]) -> Tensor:
    return pages[torch.tensor(indices, dtype=torch.long, device=pages.device)]
