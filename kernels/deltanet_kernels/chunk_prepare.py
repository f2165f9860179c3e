"""What every chunk needs before the recurrence can run over chunks: T = (I + L)^{-1}.

Notation, per state head, with C tokens a chunk (rows i, columns j):

    G     inclusive cumulative sum of the log decay g inside the chunk, float32
    D_ij  e^{G_i - G_j} for i >= j, else 0
          A gate below -100 (e^g is nothing in float32) is shut: it counts in s and adds nothing to G, so that what
          follows it keeps all its digits. D_ij = 0 where s_i != s_j, e^{G_i} = 0 where s_i > 0.
    L     tril(beta_i D_ij <k_i, k_j>, -1),  T = (I + L)^{-1}

With raw gate logits a the log decay is g = -e^{A_log} softplus(a + dt_bias); with raw write logits b the strength is
beta = sigmoid(b). With the L2 norm in the operator k stands for k / sqrt(|k|^2 + 1e-6): the raw keys stay in memory
and r = 1 / sqrt(|k|^2 + 1e-6) travels as a row factor.

T is built by block inversion. Diagonal blocks of 16: with the inverses of blocks of size b in T and B the part of L
that joins neighbouring ones, T <- T - T B T gives the inverses of size 2b. Then by block rows,
T_ab = -T_aa sum_{b <= c < a} L_ac T_cb. Every intermediate is an entry of an inverse, so nothing grows, unlike the
powers of L. Products are float32 (tf32 in three parts on tensor cores).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .kernel_config import cdiv
from .launch import launch

L2_EPS = tl.constexpr(1e-6)
MERGE_PRECISION = {torch.float32: "tf32x3"}


@dataclass(frozen=True)
class Chunks:
    """How the tokens are cut into chunks: fixed rows, or packed sequences described on the device."""

    size: int
    """tokens a chunk"""
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
def row_factors(factors, at, i, live, FULL: tl.constexpr):
    """Four factors of each row of a chunk, stored side by side from row `at`: one load that a loop can prefetch."""
    j = tl.arange(0, 4)[None, :]
    quad = factors + 4 * at + (4 * i[:, None] + j)
    x = tl.load(quad) if FULL else tl.load(quad, mask=live[:, None] & (j < 4), other=0.0)
    even, odd = tl.split(tl.reshape(x, [i.shape[0], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


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


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _block(tile, C: tl.constexpr, a: tl.constexpr, b: tl.constexpr):
    """Rows 16 a to 16 a + 15, columns 16 b to 16 b + 15 of a tile."""
    i = tl.arange(0, 16)
    return tl.load(tile + (a * 16 + i)[:, None] * C + (b * 16 + i)[None, :])


@triton.jit
def _invert_block(L, PRECISION: tl.constexpr):
    """(I + L)^{-1} of a 16 x 16 diagonal block; only the part of L under the diagonal counts."""
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    L = tl.where(i > j, L, 0.0)
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, L, 0.0)
    for level in tl.static_range(1, 4):
        joint = tl.where((i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level), L, 0.0)
        half = tl.dot(inverse, joint, input_precision=PRECISION)
        inverse -= tl.dot(half, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def _store_block(tile, C: tl.constexpr, a: tl.constexpr, b: tl.constexpr, x):
    i = tl.arange(0, 16)
    tl.store(tile + (a * 16 + i)[:, None] * C + (b * 16 + i)[None, :], x.to(tile.dtype.element_ty))


@triton.jit(do_not_specialize=["T"])
def _prepare_kernel(
    L, T_out, cu_seqlens, row_of_chunk, first_chunk, T,
    HV: tl.constexpr, C: tl.constexpr, VARLEN: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """One program a (chunk of 64 or 32 tokens, state head), in blocks of 16 that a warp holds in registers."""
    pid = tl.program_id(0)
    c = pid // HV
    _, _, _, valid = locate_chunk(c, cu_seqlens, row_of_chunk, first_chunk, T, C, VARLEN)
    if valid <= 0:
        return
    source = L + pid.to(tl.int64) * (C * C)
    tile = T_out + pid.to(tl.int64) * (C * C)
    zero = tl.zeros([16, 16], dtype=tl.float32)

    T00 = _invert_block(_block(source, C, 0, 0), MERGE)
    _store_block(tile, C, 0, 0, T00)
    _store_block(tile, C, 0, 1, zero)
    T11 = _invert_block(_block(source, C, 1, 1), MERGE)
    L10 = _block(source, C, 1, 0)
    T10 = -tl.dot(T11, tl.dot(L10, T00, input_precision=MERGE), input_precision=MERGE)
    _store_block(tile, C, 1, 0, T10)
    _store_block(tile, C, 1, 1, T11)
    if C == 64:
        T22 = _invert_block(_block(source, C, 2, 2), MERGE)
        L20 = _block(source, C, 2, 0)
        L21 = _block(source, C, 2, 1)
        X20 = tl.dot(L20, T00, input_precision=MERGE) + tl.dot(L21, T10, input_precision=MERGE)
        T20 = -tl.dot(T22, X20, input_precision=MERGE)
        T21 = -tl.dot(T22, tl.dot(L21, T11, input_precision=MERGE), input_precision=MERGE)
        _store_block(tile, C, 0, 2, zero)
        _store_block(tile, C, 1, 2, zero)
        _store_block(tile, C, 2, 0, T20)
        _store_block(tile, C, 2, 1, T21)
        _store_block(tile, C, 2, 2, T22)
        T33 = _invert_block(_block(source, C, 3, 3), MERGE)
        L30 = _block(source, C, 3, 0)
        L31 = _block(source, C, 3, 1)
        L32 = _block(source, C, 3, 2)
        X32 = tl.dot(L32, T22, input_precision=MERGE)
        X31 = tl.dot(L31, T11, input_precision=MERGE) + tl.dot(L32, T21, input_precision=MERGE)
        X30 = tl.dot(L30, T00, input_precision=MERGE) + tl.dot(L31, T10, input_precision=MERGE)
        X30 += tl.dot(L32, T20, input_precision=MERGE)
        _store_block(tile, C, 0, 3, zero)
        _store_block(tile, C, 1, 3, zero)
        _store_block(tile, C, 2, 3, zero)
        _store_block(tile, C, 3, 0, -tl.dot(T33, X30, input_precision=MERGE))
        _store_block(tile, C, 3, 1, -tl.dot(T33, X31, input_precision=MERGE))
        _store_block(tile, C, 3, 2, -tl.dot(T33, X32, input_precision=MERGE))
        _store_block(tile, C, 3, 3, T33)


def cut_chunks(batch: int, tokens: int, size: int, cu_seqlens: torch.Tensor | None) -> Chunks:
    """Cut [batch, tokens] into chunks of `size`; packed sequences are counted on the device, without a wait."""
    if cu_seqlens is None:
        return Chunks(size, batch, tokens, batch * cdiv(tokens, size), None, None, None)
    rows = cu_seqlens.numel() - 1
    count = cdiv(tokens, size) + rows
    table = torch.empty(count + rows, dtype=torch.int32, device=cu_seqlens.device)
    row_of_chunk, first_chunk = table[:count], table[count:]
    cu_seqlens = cu_seqlens.contiguous()
    launch(_chunk_table_kernel, rows + 1, cu_seqlens, row_of_chunk, first_chunk, rows, count, C=size, BLOCK=256)
    return Chunks(size, rows, tokens, count, cu_seqlens, row_of_chunk, first_chunk)


def prepare(
    L: torch.Tensor, dtype: torch.dtype, tokens: int, chunks: Chunks, precision: str, num_warps: int
) -> torch.Tensor:
    """T [chunks, HV, C, C] in `dtype` from L [chunks, HV, C, C] of rows of so many tokens."""
    inverse = torch.empty(L.shape, dtype=dtype, device=L.device)
    if chunks.count:
        launch(
            _prepare_kernel, chunks.count * L.shape[1],
            L, inverse, chunks.cu_seqlens, chunks.row_of_chunk, chunks.first_chunk, tokens, HV=L.shape[1],
            C=chunks.size, VARLEN=chunks.varlen,
            MERGE=MERGE_PRECISION.get(dtype, "tf32") if precision != "ieee" else "ieee", num_warps=num_warps,
        )  # fmt: skip
    return inverse
