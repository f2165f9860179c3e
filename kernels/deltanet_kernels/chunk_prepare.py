"""What every chunk needs before the recurrence can run over chunks: gates, key norms and T = (I + L)^{-1}.

Notation, per state head, with C tokens a chunk (rows i, columns j):

    G     inclusive cumulative sum of the log decay g inside the chunk, float32
    D_ij  e^{G_i - G_j} for i >= j, else 0
    L     tril(beta_i D_ij <k_i, k_j>, -1),  T = (I + L)^{-1}

With raw gate logits a the log decay is g = -e^{A_log} softplus(a + dt_bias); with raw write logits b the strength is
beta = sigmoid(b). With the L2 norm in the operator k stands for k / sqrt(|k|^2 + 1e-6): the raw keys stay in memory
and r = 1 / sqrt(|k|^2 + 1e-6) travels as a row factor.

T is built by block inversion: with the inverses of the diagonal blocks of size b in T and B the part of L that joins
neighbouring blocks, T <- T - T B T gives the inverses of size 2b. Every intermediate is an entry of an inverse, so
nothing grows, unlike the powers of L.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

L2_EPS = tl.constexpr(1e-6)


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
def _invert_unit_lower(L, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^{-1} for a strictly lower triangular L [C, C], float32."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, L, 0.0)
    for level in tl.static_range(1, 6):
        if 2**level < C:
            joint = tl.where((i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level), L, 0.0)
            half = tl.dot(inverse, joint, input_precision=PRECISION)
            inverse -= tl.dot(half, inverse, input_precision=PRECISION)
    return inverse


@triton.jit(do_not_specialize=["T"])
def _prepare_kernel(
    k, g, beta, A_log, dt_bias, G_out, beta_out, r_out, T_out,
    cu_seqlens, row_of_chunk, first_chunk, T, tokens, k_row, k_token, k_head,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    GATE: tl.constexpr, SIGMOID: tl.constexpr, NORM: tl.constexpr, VARLEN: tl.constexpr,
    SMALLEST: tl.constexpr, PRECISION: tl.constexpr, INVERSE_PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    c = pid // HV
    head = pid % HV
    row, first, flat, valid = locate_chunk(c, cu_seqlens, row_of_chunk, first_chunk, T, C, VARLEN)
    if valid <= 0:
        return
    i = tl.arange(0, C)
    live = i < valid
    gates = (flat + i) * HV + head
    x = tl.load(g + gates, mask=live, other=0.0).to(tl.float32)
    if GATE:
        x = -tl.exp(tl.load(A_log + head).to(tl.float32)) * _softplus(x + tl.load(dt_bias + head).to(tl.float32))
    G = tl.cumsum(tl.where(live, x, 0.0), axis=0)
    b = tl.load(beta + gates, mask=live, other=0.0).to(tl.float32)
    if SIGMOID:
        b = 1.0 / (1.0 + tl.exp(-b))
    # dbeta = rowsum(dW V') / beta needs V', which is a multiple of beta, in the floating range.
    b = tl.where(live, tl.where(tl.abs(b) < SMALLEST, SMALLEST, b), 0.0)

    d = tl.arange(0, BK)
    keys = k + row * k_row + (head // (HV // H)) * k_head + (first + i)[:, None] * k_token + d[None, :]
    k_CK = tl.load(keys, mask=live[:, None] & (d < K)[None, :], other=0.0)
    L = tl.dot(k_CK, tl.trans(k_CK), input_precision=PRECISION)
    rows = head.to(tl.int64) * tokens + flat + i
    if NORM:
        x_CK = k_CK.to(tl.float32)
        r = tl.rsqrt(tl.sum(x_CK * x_CK, axis=1) + L2_EPS)
        L = L * r[:, None] * r[None, :]
        tl.store(r_out + rows, r, mask=live)
    strict = i[:, None] > i[None, :]
    L = tl.where(strict, b[:, None] * L * tl.exp(tl.where(strict, G[:, None] - G[None, :], 0.0)), 0.0)
    inverse = _invert_unit_lower(L, C, INVERSE_PRECISION)

    tl.store(G_out + rows, G, mask=live)
    tl.store(beta_out + rows, b, mask=live)
    tile = (c.to(tl.int64) * HV + head) * (C * C) + i[:, None] * C + i[None, :]
    tl.store(T_out + tile, inverse.to(T_out.dtype.element_ty))


def cut_chunks(batch: int, tokens: int, size: int, cu_seqlens: torch.Tensor | None) -> Chunks:
    """Cut [batch, tokens] into chunks of `size`; packed sequences are counted on the device, without a wait."""
    if cu_seqlens is None:
        return Chunks(size, batch, tokens, batch * triton.cdiv(tokens, size), None, None, None)
    rows = cu_seqlens.numel() - 1
    count = triton.cdiv(tokens, size) + rows
    table = torch.empty(count + rows, dtype=torch.int32, device=cu_seqlens.device)
    row_of_chunk, first_chunk = table[:count], table[count:]
    cu_seqlens = cu_seqlens.contiguous()
    _chunk_table_kernel[(rows + 1,)](cu_seqlens, row_of_chunk, first_chunk, rows, count, C=size, BLOCK=256)
    return Chunks(size, rows, tokens, count, cu_seqlens, row_of_chunk, first_chunk)


@dataclass(frozen=True)
class Prepared:
    """Row factors, head first [HV, B*T] float32, and T [chunks, HV, C, C] in the matrix type."""

    G: torch.Tensor
    beta: torch.Tensor
    r: torch.Tensor
    T: torch.Tensor


def prepare(
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    chunks: Chunks,
    sigmoid: bool,
    norm: bool,
    precision: str,
    num_warps: int,
) -> Prepared:
    """Gates, key norms and T for k [B, T, H, K] (unit stride along K) and contiguous g, beta [B, T, HV]."""
    B, T, H, K = k.shape
    HV = g.shape[2]
    factors = torch.empty(3, HV, B * T, dtype=torch.float32, device=k.device)
    inverse = torch.empty(chunks.count, HV, chunks.size, chunks.size, dtype=k.dtype, device=k.device)
    if chunks.count:
        _prepare_kernel[(chunks.count * HV,)](
            k, g, beta, A_log, dt_bias, factors[0], factors[1], factors[2], inverse,
            chunks.cu_seqlens, chunks.row_of_chunk, chunks.first_chunk, T, B * T, *k.stride()[:3],
            H=H, HV=HV, K=K, BK=max(16, triton.next_power_of_2(K)), C=chunks.size,
            GATE=A_log is not None, SIGMOID=sigmoid, NORM=norm, VARLEN=chunks.varlen,
            SMALLEST=3e-5 if k.dtype == torch.float16 else 1e-20, PRECISION=precision, INVERSE_PRECISION="ieee" if precision == "ieee" else "tf32x3",
            num_warps=num_warps,
        )  # fmt: skip
    return Prepared(factors[0], factors[1], factors[2], inverse)
