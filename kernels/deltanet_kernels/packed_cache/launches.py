"""Launches the kernels on a packed cache and registers the operators."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math

import torch
from torch import Tensor

from deltanet_kernels.common.device import capability, multiprocessors
from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import cached, operator
from deltanet_kernels.common.sizes import cdiv, power_of_two
from deltanet_kernels.flash_decoding.config import COMBINED, MAX_GROUP
from deltanet_kernels.flash_decoding.kernels import combine_kernel
from deltanet_kernels.gated_delta_rule.config import product_precision
from deltanet_kernels.packed_cache.calls import PackedAppendCall, PackedAttentionCall, PackGroupsCall
from deltanet_kernels.packed_cache.kernels import append_kernel, pack_kernel, packed_span_kernel
from deltanet_kernels.packed_cache.layout import GROUP

LEAST_SPAN = 2  # groups: a shorter span costs more in the sum over spans than its program saves
PROGRAMS = 16  # per multiprocessor


@cached
def packed_config(D: int, bits: int, dtype: torch.dtype) -> tuple[int, int]:
    """Warps and pipeline stages of the attention. One warp exchanges nothing, if it has the registers for a group."""
    return (1 if D * bits <= 1024 and dtype != torch.float32 else 4), 3


def _supported(D: int, dtype: torch.dtype) -> None:
    if D not in (64, 128, 256):
        raise NotImplementedError(f"a packed cache with head size {D}: the kernels take 64, 128 and 256")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotImplementedError(f"a packed cache in {dtype}: the kernels take float32, bfloat16 and float16")


def _fake_attention(q, key_codes, key_scales, value_codes, value_scales, keys, values, lengths, *rest):
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)


@operator(_fake_attention)
def packed_attention_op(
    q: Tensor, key_codes: Tensor, key_scales: Tensor, value_codes: Tensor, value_scales: Tensor, keys: Tensor,
    values: Tensor, lengths: Tensor, window: int, sinks: int, limit: int, scale: float, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o [B, HQ, 1, D] and the log-sum-exp of the scores [B, HQ] float32."""
    (B, HQ, _, D), (HK, N) = q.shape, key_codes.shape[1:3]
    bits = 8 * key_codes.shape[4] // D
    warps, stages = packed_config(D, bits, q.dtype)
    span = max(LEAST_SPAN, cdiv(N * B * HK, PROGRAMS * multiprocessors(q.device)))
    spans = 1 + cdiv(N, span)
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((B, HQ), dtype=torch.float32, device=q.device)
    parts = torch.empty((B, HQ, spans, D), dtype=torch.float32, device=q.device)
    weights = torch.empty((B, HQ, spans, 2), dtype=torch.float32, device=q.device)
    launch(
        packed_span_kernel, B * HK * spans,
        q.contiguous(), key_codes, key_scales, value_codes, value_scales, keys, values, lengths, parts, weights,
        scale * math.log2(math.e) if softcap is None else scale / softcap, N, span, spans, window, sinks, limit,
        HK=HK, HEADS=HQ // HK, D=D, BITS=bits, BM=max(16, power_of_two(HQ // HK)), CAP=softcap,
        PAIRS=bits == 4 and q.dtype == torch.bfloat16 and capability(q.device) >= (8, 0), STAGES=stages,
        PRECISION=product_precision("auto", q.dtype), num_warps=warps,
    )  # fmt: skip
    launch(combine_kernel, B * HQ, parts, weights, o, lse, spans, D=D, BD=D, BN=COMBINED // D, num_warps=4)
    return o, lse


def packed_attention_triton(call: PackedAttentionCall) -> tuple[Tensor, Tensor]:
    """`deltanet_kernels.packed_attention` in Triton.

    Raises:
        NotImplementedError: other head sizes than 64, 128 and 256, more than 32 query heads per key head, or a dtype
            other than float32, bfloat16, float16.
    """
    q, cache = call.q, call.cache
    _supported(q.shape[3], q.dtype)
    if q.shape[1] > MAX_GROUP * cache.keys.shape[1]:
        raise NotImplementedError(f"{q.shape[1] // cache.keys.shape[1]} query heads per key head: up to {MAX_GROUP}")
    found: tuple[Tensor, Tensor] = packed_attention_op(q, *cache, *call.reach, call.factor, call.softcap)
    return found


def _fake_append(*_):
    return None


@operator(
    _fake_append,
    mutates=("key_codes", "key_scales", "value_codes", "value_scales", "keys", "values", "lengths"),
)
def packed_append_op(
    key_codes: Tensor, key_scales: Tensor, value_codes: Tensor, value_scales: Tensor, keys: Tensor, values: Tensor,
    lengths: Tensor, k: Tensor, v: Tensor,
) -> None:  # fmt: skip
    """Put k and v [B, HK, 1, D] in place."""
    (B, HK, N), D = key_codes.shape[:3], keys.shape[3]
    launch(
        append_kernel, B * HK, key_codes, key_scales, value_codes, value_scales, keys, values, lengths,
        k, v, N, *k.stride()[:2], *v.stride()[:2], HK=HK, D=D, BITS=8 * key_codes.shape[4] // D, num_warps=4,
    )  # fmt: skip
    lengths.add_(1)


def packed_append_triton_(call: PackedAppendCall) -> None:
    """`deltanet_kernels.packed_append_` in Triton."""
    k, v, cache = call
    _supported(k.shape[3], k.dtype)
    packed_append_op(*cache, *(x if x.stride(3) == 1 else x.contiguous() for x in (k, v)))


def _fake_pack(k, v, bits):
    (B, HK, length, D) = k.shape
    N = length // GROUP
    key_codes = k.new_empty(B, HK, N, GROUP, D * bits // 8, dtype=torch.uint8)
    key_scales = k.new_empty(B, HK, N, 2, D, dtype=torch.bfloat16)
    value_codes = k.new_empty(B, HK, N, D, GROUP * bits // 8, dtype=torch.uint8)
    value_scales = k.new_empty(B, HK, N, 2, D // GROUP, GROUP, dtype=torch.bfloat16)
    return key_codes, key_scales, value_codes, value_scales


@operator(_fake_pack)
def pack_groups_op(k: Tensor, v: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the codes and scales of keys and of values [B, HK, N * 32, D]."""
    B, HK, T, D = k.shape
    packed: tuple[Tensor, Tensor, Tensor, Tensor] = _fake_pack(k, v, bits)
    if T:
        launch(
            pack_kernel, B * HK * (T // GROUP), k, v, *packed,
            T // GROUP, *k.stride()[:3], *v.stride()[:3], HK=HK, D=D, BITS=bits, num_warps=4,
        )  # fmt: skip
    return packed


def pack_groups_triton(call: PackGroupsCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`deltanet_kernels.pack_groups` in Triton."""
    k, v, bits = call
    _supported(k.shape[3], k.dtype)
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    packed: tuple[Tensor, Tensor, Tensor, Tensor] = pack_groups_op(k, v, bits)
    return packed
