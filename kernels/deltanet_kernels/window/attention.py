"""Attention over window and sinks in Triton: launches its kernels, and registers the operator and its gradient."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from deltanet_kernels.common.config import check_supported, product_precision
from deltanet_kernels.common.device import multiprocessors
from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import differentiable_call, operator
from deltanet_kernels.common.sequences import cut_chunks
from deltanet_kernels.window.calls import WindowCall
from deltanet_kernels.window.config import key_heads, window_config
from deltanet_kernels.window.forward import forward_kernel
from deltanet_kernels.window.gradients_k import gradients_k_kernel, sink_sums_kernel
from deltanet_kernels.window.gradients_q import gradients_q_kernel

PARTS = 32  # parts of a sink's gradient that are added at a time


def reach_within(window: int, sinks: int, tokens: int) -> tuple[int, int]:
    """Window and sinks cut to the length; no sinks where the window shows all."""
    return (tokens, 0) if window >= tokens else (window, min(sinks, tokens - window))


def strided(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], list[int]]:
    """Tensors [B, T, H, D] with adjacent channels, and their other strides."""
    rows = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
    return rows, [stride for x in rows for stride in x.stride()[:3]]


class Upstream(NamedTuple):
    """The gradients of the output and of the log-sum-exp."""

    do: torch.Tensor
    dlse: torch.Tensor | None


class Kept(NamedTuple):
    """The results of the forward pass, which the backward pass reads."""

    o: torch.Tensor
    lse: torch.Tensor


class OtherForm(NamedTuple):
    """Contiguous keys and values that queries see of the tokens before their own group of `group`; none by default."""

    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    group: int = 0


def _fake_window_forward(call: WindowCall):
    q = call.q
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@operator(_fake_window_forward)
def window_forward(call: WindowCall) -> tuple[torch.Tensor, torch.Tensor]:
    """o [B, T, HQ, D] and lse [B, T, HQ]."""
    (q, k, v), strides = strided(*call[:3])
    (B, T, HQ, D), HK = q.shape, k.shape[2]
    window, sinks = reach_within(call.window, call.sinks, T)
    config = window_config("forward", D, sinks, q.dtype)
    chunks = cut_chunks(B, T, config.M, call.cu_seqlens)
    o, lse = _fake_window_forward(call)
    if chunks.varlen:
        o.zero_()
        lse.zero_()
    launch(
        forward_kernel, chunks.count * HQ,
        q, k, v, o, lse, chunks.cu_seqlens, chunks.row_of_chunk, chunks.first_chunk, T, window, call.factor, *strides,
        HQ=HQ, HK=HK, D=D, SINKS=sinks, BM=config.M, BN=config.N, BS=config.S, BD=config.D, VARLEN=chunks.varlen,
        STAGES=config.stages, CAP=call.softcap, PRECISION=product_precision("auto", q.dtype), EDGE=call.edge,
        num_warps=config.warps,
    )  # fmt: skip
    return o, lse


def _fake_window_backward(upstream: Upstream, call: WindowCall, kept: Kept, other: OtherForm):
    return tuple(x.new_empty(x.shape) for x in call[:3])


@operator(_fake_window_backward)
def window_backward(
    upstream: Upstream, call: WindowCall, kept: Kept, other: OtherForm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, to which those of their other form are added."""
    (q, k, v, do), strides = strided(*call[:3], upstream.do)
    o, lse = (x.contiguous() for x in kept)
    dlse = None if upstream.dlse is None else upstream.dlse.contiguous()
    (keys, values, group), scale, cu_seqlens = other, call.factor, call.cu_seqlens
    softcap, edge = call.softcap, call.edge
    (B, T, HQ, D), HK = q.shape, k.shape[2]
    window, sinks = reach_within(call.window, call.sinks, T)
    config = window_config("gradients_q", D, sinks, q.dtype)
    chunks = cut_chunks(B, T, config.M, cu_seqlens)
    make = torch.zeros if chunks.varlen else torch.empty
    dq = make(q.shape, dtype=q.dtype, device=q.device)
    delta = torch.empty_like(lse)
    parts = lse.new_empty(chunks.count, 2, HQ, sinks, D)
    sums = lse.new_empty(chunks.rows, 2, HK, sinks, D)
    sizes: dict[str, Any] = {"HQ": HQ, "HK": HK, "D": D, "SINKS": sinks}
    precision = product_precision("auto", q.dtype)
    lengths = (T, None if keys is None else keys.shape[1])
    launch(
        gradients_q_kernel, chunks.count * HQ,
        q, k, v, o, do, lse, dlse, dq, delta, parts, chunks.cu_seqlens, chunks.row_of_chunk, chunks.first_chunk, keys,
        values, *lengths, window, scale, *strides, **sizes, TILE=config, CAP=softcap, GROUP=group, PRECISION=precision,
        EDGE=edge, num_warps=config.warps,
    )  # fmt: skip
    if sinks:
        launch(
            sink_sums_kernel, chunks.rows * 2 * HK * sinks,
            parts, sums, chunks.cu_seqlens, chunks.first_chunk, T, window, **sizes, BM=config.M, BD=config.D,
            VARLEN=chunks.varlen, ROWS=PARTS, num_warps=4,
        )  # fmt: skip
    config = window_config("gradients_k", D, sinks, q.dtype)
    chunks = cut_chunks(B, T, config.N, cu_seqlens)
    heads = key_heads(HQ // HK, chunks.count * HK, multiprocessors(q.device))
    summed = HQ // HK // heads  # programs that share keys, each with sums of its own
    shape, dtype = (k.shape, k.dtype) if summed == 1 else ((summed, *k.shape), torch.float32)
    dk, dv = (make(shape, dtype=dtype, device=k.device) for _ in range(2))
    launch(
        gradients_k_kernel, chunks.count * (HQ // heads),
        q, k, v, do, lse, delta, sums, dk, dv, chunks.cu_seqlens, chunks.row_of_chunk, chunks.first_chunk, keys, values,
        *lengths, window, scale, k.numel(), *strides, **sizes, TILE=replace(config, heads=heads), CAP=softcap,
        GROUP=group, PRECISION=precision, EDGE=edge, num_warps=config.warps,
    )  # fmt: skip
    if summed > 1:
        dk, dv = (x.sum(0).to(k.dtype) for x in (dk, dv))
    return dq, dk, dv


def _backward(upstream: Upstream, call: WindowCall, kept: Kept) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return window_backward(upstream, call, kept, OtherForm())


_attention = differentiable_call(window_forward, _backward, ("q", "k", "v"), Upstream, Kept)


def window_attention_triton(call: WindowCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`deltanet_kernels.window_attention` in Triton, for checked arguments.

    Raises:
        NotImplementedError: head sizes over 256, or dtypes other than float32, bfloat16, float16.
    """
    D = call.q.shape[3]
    check_supported(call.q.dtype, D, D)
    return _attention(call)
