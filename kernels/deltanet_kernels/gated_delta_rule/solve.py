"""Chunked gated delta rule, second stage: T = (I + L)^{-1} by block inversion.

The diagonal blocks are 16 x 16. With the inverses of blocks of size b in T, and B the part of L that joins neighbouring
blocks, T <- T - T B T gives the inverses of size 2b. Then by block rows, T_ab = -T_aa sum_{b <= c < a} L_ac T_cb. Every
intermediate is an entry of an inverse, so nothing grows, unlike the powers of L. Products are float32 (tf32 in three
parts on tensor cores).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.sequences import Chunks, locate_chunk

MERGE_PRECISION = {torch.float32: "tf32x3"}


@triton.jit
def _block(tile, C: tl.constexpr, a: tl.constexpr, b: tl.constexpr):
    """Rows 16 a to 16 a + 15, columns 16 b to 16 b + 15 of a tile."""
    i = tl.arange(0, 16)
    return tl.load(tile + (a * 16 + i)[:, None] * C + (b * 16 + i)[None, :])


@triton.jit
def inverted(L, i, j, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^{-1} for 2^LEVELS tokens, i [:, None] of the rows and j [None, :] of the columns of L: 0 unless i > j."""
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, L, 0.0)
    for level in tl.static_range(1, LEVELS):
        joint = tl.where((i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level), L, 0.0)
        half = tl.dot(inverse, joint, input_precision=PRECISION)
        inverse -= tl.dot(half, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def _invert_block(L, PRECISION: tl.constexpr):
    """(I + L)^{-1} of a 16 x 16 diagonal block; only the part of L below the diagonal is read."""
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    return inverted(tl.where(i > j, L, 0.0), i, j, 4, PRECISION)


@triton.jit
def _store_block(tile, C: tl.constexpr, a: tl.constexpr, b: tl.constexpr, x):
    i = tl.arange(0, 16)
    tl.store(tile + (a * 16 + i)[:, None] * C + (b * 16 + i)[None, :], x.to(tile.dtype.element_ty))


@triton.jit(do_not_specialize=["T"])
def inverse_kernel(
    L, T_out, cu_seqlens, row_of_chunk, first_chunk, T,
    HV: tl.constexpr, C: tl.constexpr, VARLEN: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """Compute T in blocks of 16 held in registers; one program per (chunk of 64 or 32 tokens, state head)."""
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


def invert(
    L: torch.Tensor, dtype: torch.dtype, tokens: int, chunks: Chunks, precision: str, num_warps: int
) -> torch.Tensor:
    """T [chunks, HV, C, C] in `dtype` from L [chunks, HV, C, C]; `tokens` is the length of a row."""
    inverse = torch.empty(L.shape, dtype=dtype, device=L.device)
    if chunks.count:
        launch(
            inverse_kernel, chunks.count * L.shape[1],
            L, inverse, chunks.cu_seqlens, chunks.row_of_chunk, chunks.first_chunk, tokens, HV=L.shape[1],
            C=chunks.size, VARLEN=chunks.varlen,
            MERGE=MERGE_PRECISION.get(dtype, "tf32") if precision != "ieee" else "ieee", num_warps=num_warps,
        )  # fmt: skip
    return inverse
