"""Attention of one query per sequence in Triton: launches its kernels and registers the operator."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch

from deltanet_kernels.common.config import check_supported, product_precision
from deltanet_kernels.common.device import multiprocessors
from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.online_softmax import COMBINED, combine_kernel
from deltanet_kernels.common.registration import operator
from deltanet_kernels.common.sizes import power_of_two
from deltanet_kernels.flash_decoding.calls import DecodeAttentionCall
from deltanet_kernels.flash_decoding.config import MASK_BLOCK, MAX_GROUP, cut_places, decode_config
from deltanet_kernels.flash_decoding.kernels import span_kernel


def _fake_decode_attention(call: DecodeAttentionCall):
    return torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device)


@operator(_fake_decode_attention)
def decode_attention_op(call: DecodeAttentionCall) -> torch.Tensor:
    """Return o [B, HQ, 1, D], contiguous."""
    (B, HQ, _, D), (HK, S) = call.q.shape, call.k.shape[1:3]
    q, k, v = (x if x.stride(3) == 1 or D == 1 else x.contiguous() for x in call[:3])
    config = decode_config(D, q.dtype)
    span, spans = cut_places(S, B * HK, multiprocessors(q.device), config.N)
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    split = spans > 1
    parts = torch.empty((B, HQ, spans, D), dtype=torch.float32, device=q.device) if split else o
    weights = torch.empty((B, HQ, spans, 2), dtype=torch.float32, device=q.device) if split else None
    launch(
        span_kernel, B * HK * spans,
        q, k, v, call.mask.contiguous(), parts, weights, call.factor, S, span, spans, *q.stride()[:2], *k.stride()[:3],
        *v.stride()[:3],
        HK=HK, GROUP=HQ // HK, D=D, BM=power_of_two(HQ // HK), BN=config.N, BD=config.D, BLOCK=MASK_BLOCK, SPLIT=split,
        EXACT=q.dtype == torch.float32, STAGES=config.stages, PRECISION=product_precision("auto", q.dtype),
        num_warps=config.warps,
    )  # fmt: skip
    if split:
        BD = power_of_two(D)
        launch(
            combine_kernel, B * HQ, parts, weights, o, None, spans, D=D, BD=BD, BN=COMBINED // BD, GAPS=False,
            num_warps=4,
        )  # fmt: skip
    return o


def decode_attention_triton(call: DecodeAttentionCall) -> torch.Tensor:
    """`deltanet_kernels.decode_attention` in Triton, for checked arguments.

    Raises:
        NotImplementedError: head sizes over 256, more than 32 query heads per key head, or dtypes other than float32,
            bfloat16, float16.
    """
    D, group = call.q.shape[3], call.q.shape[1] // call.k.shape[1]
    check_supported(call.q.dtype, D, D)
    if group > MAX_GROUP:
        raise NotImplementedError(f"{group} query heads per key head: the kernels take up to {MAX_GROUP}")
    return decode_attention_op(call)
