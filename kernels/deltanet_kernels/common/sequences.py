"""Cutting sequences into chunks, and locating a chunk's or a sequence's tokens from within a kernel.

Rows of a batch have equal length. Packed sequences follow one another in a single row; their lengths are known
only on the device, so a small kernel writes the table of chunks and the host launches an upper bound of programs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.sizes import cdiv


@dataclass(frozen=True)
class Chunks:
    """How the tokens are cut into chunks: fixed rows, or packed sequences described on the device."""

    size: int
    """tokens per chunk"""
    rows: int
    """batch rows, or packed sequences"""
    tokens: int
    """tokens of a batch row, or of all packed sequences"""
    count: int
    """chunks in all; an upper bound for packed sequences, whose lengths only the device knows"""
    cu_seqlens: torch.Tensor | None
    row_of_chunk: torch.Tensor | None
    first_chunk: torch.Tensor | None

    @property
    def varlen(self) -> bool:
        return self.cu_seqlens is not None


@triton.jit
def _chunk_table_kernel(cu_seqlens, row_of_chunk, first_chunk, rows, count, C: tl.constexpr, BLOCK: tl.constexpr):
    """Program n writes the chunks of packed sequence n; program `rows` marks the unused ones with -1."""
    n = tl.program_id(0)
    offset = tl.zeros([], dtype=tl.int32)
    i = tl.arange(0, BLOCK)
    for start in range(0, n, BLOCK):
        m = start + i < n
        begin = tl.load(cu_seqlens + start + i, mask=m, other=0)
        end = tl.load(cu_seqlens + start + i + 1, mask=m, other=0)
        offset += tl.sum((end - begin + C - 1) // C, axis=0).to(tl.int32)
    if n < rows:
        tl.store(first_chunk + n, offset)
        length = tl.load(cu_seqlens + n + 1) - tl.load(cu_seqlens + n)
        last = offset + ((length + C - 1) // C).to(tl.int32)
        value = n
    else:
        last = offset * 0 + count
        value = n * 0 - 1
    for start in range(offset, last, BLOCK):
        tl.store(row_of_chunk + start + i, value + i * 0, mask=start + i < last)


@triton.jit
def locate_chunk(c, cu_seqlens, row_of_chunk, first_chunk, T, C: tl.constexpr, VARLEN: tl.constexpr):
    """Chunk c -> (batch row of strided tensors, first token in that row, first token of all, tokens in the chunk).

    Zero tokens for the unused chunks of a packed batch.
    """
    if VARLEN:
        n = tl.load(row_of_chunk + c)
        safe = tl.maximum(n, 0)
        begin = tl.load(cu_seqlens + safe).to(tl.int64)
        end = tl.load(cu_seqlens + safe + 1).to(tl.int64)
        row = begin * 0
        first = begin + (c - tl.load(first_chunk + safe)).to(tl.int64) * C
        valid = tl.where(n < 0, 0, tl.minimum(end - first, C))
        flat = first
    else:
        chunks_a_row = tl.cdiv(T, C)
        row = (c // chunks_a_row).to(tl.int64)
        first = (c % chunks_a_row).to(tl.int64) * C
        valid = tl.minimum(T - first, C)
        flat = row * T + first
    return row, first, flat, valid.to(tl.int32)


@triton.jit
def locate_row(n, cu_seqlens, T, VARLEN: tl.constexpr):
    """Sequence n -> (batch row of strided tensors, first token in that row, first token of all, tokens)."""
    if VARLEN:
        begin = tl.load(cu_seqlens + n).to(tl.int64)
        length = (tl.load(cu_seqlens + n + 1) - begin).to(tl.int32)
        row = begin * 0
        flat = begin
    else:
        row = n.to(tl.int64)
        begin = row * 0
        length = T
        flat = row * T
    return row, begin, flat, length


def cut_chunks(batch: int, tokens: int, size: int, cu_seqlens: torch.Tensor | None) -> Chunks:
    """Cut [batch, tokens] into chunks of `size`; the device counts packed sequences, so the host does not wait."""
    if cu_seqlens is None:
        return Chunks(size, batch, tokens, batch * cdiv(tokens, size), None, None, None)
    rows = cu_seqlens.numel() - 1
    count = cdiv(tokens, size) + rows
    table = torch.empty(count + rows, dtype=torch.int32, device=cu_seqlens.device)
    row_of_chunk, first_chunk = table[:count], table[count:]
    cu_seqlens = cu_seqlens.contiguous()
    launch(_chunk_table_kernel, rows + 1, cu_seqlens, row_of_chunk, first_chunk, rows, count, C=size, BLOCK=256)
    return Chunks(size, rows, tokens, count, cu_seqlens, row_of_chunk, first_chunk)
