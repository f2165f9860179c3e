"""Attention over window and sinks in Triton: launches its kernels, and registers the operator and its gradient."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any

import torch

from deltanet_kernels.common.device import multiprocessors
from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import differentiable, gradient, operator
from deltanet_kernels.common.sequences import cut_chunks
from deltanet_kernels.gated_delta_rule.config import check_supported, product_precision
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


def _fake_window_forward(q, k, v, cu_seqlens, window, sinks, scale, softcap, edge):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@operator(_fake_window_forward)
def window_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None, window: int, sinks: int,
    scale: float, softcap: float | None, edge: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """o [B, T, HQ, D] and lse [B, T, HQ]."""
    (q, k, v), strides = strided(q, k, v)
    (B, T, HQ, D), HK = q.shape, k.shape[2]
    window, sinks = reach_within(window, sinks, T)
    config = window_config("forward", D, sinks, q.dtype)
    chunks = cut_chunks(B, T, config.M, cu_seqlens)
    o, lse = _fake_window_forward(q, k, v, cu_seqlens, window, sinks, scale, softcap, edge)
    if chunks.varlen:
        o.zero_()
        lse.zero_()
    launch(
        forward_kernel, chunks.count * HQ,
        q, k, v, o, lse, chunks.cu_seqlens, chunks.row_of_chunk, chunks.first_chunk, T, window, scale, *strides,
        HQ=HQ, HK=HK, D=D, SINKS=sinks, BM=config.M, BN=config.N, BS=config.S, BD=config.D, VARLEN=chunks.varlen,
        STAGES=config.stages, CAP=softcap, PRECISION=product_precision("auto", q.dtype), EDGE=edge,
        num_warps=config.warps,
    )  # fmt: skip
    return o, lse


def _fake_window_backward(do, dlse, q, k, v, *rest):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@operator(_fake_window_backward)
def window_backward(
    do: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor,
    lse: torch.Tensor, cu_seqlens: torch.Tensor | None, window: int, sinks: int, scale: float,
    softcap: float | None, keys: torch.Tensor | None = None, values: torch.Tensor | None = None, group: int = 0,
    edge: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of q, k and v.

    With keys and values, contiguous, queries see the tokens before their own group of so many in this form; its
    gradients are added to those of k and v.
    """
    (q, k, v, do), strides = strided(q, k, v, do)
    o, lse, dlse = o.contiguous(), lse.contiguous(), None if dlse is None else dlse.contiguous()
    (B, T, HQ, D), HK = q.shape, k.shape[2]
    window, sinks = reach_within(window, sinks, T)
    config = window_config("gradients_q", D, sinks, q.dtype)
    chunks = cut_chunks(B, T, config.M, cu_seqlens)
    make = torch.zeros if chunks.varlen else torch.empty
    dq = make(q.shape, dtype=q.dtype, device=q.device)
    delta = torch.empty_like(lse)
    parts = lse.new_empty(chunks.count, 2, HQ, sinks, D)
    sums = lse.new_empty(chunks.rows, 2, HK, sinks, D)
    sizes: dict[str, Any] = {"HQ": HQ, "HK": HK, "D": D, "SINKS": sinks, "BD": config.D, "VARLEN": chunks.varlen}
    precision = product_precision("auto", q.dtype)
    lengths = (T, None if keys is None else keys.shape[1])
    launch(
        gradients_q_kernel, chunks.count * HQ,
        q, k, v, o, do, lse, dlse, dq, delta, parts, chunks.cu_seqlens, chunks.row_of_chunk, chunks.first_chunk, keys,
        values, *lengths, window, scale, *strides, **sizes, BM=config.M, BN=config.N, BS=config.S,
        DLSE=dlse is not None, STAGES=config.stages, CAP=softcap, GROUP=group, PRECISION=precision,
        EDGE=edge, num_warps=config.warps,
    )  # fmt: skip
    if sinks:
        launch(
            sink_sums_kernel, chunks.rows * 2 * HK * sinks,
            parts, sums, chunks.cu_seqlens, chunks.first_chunk, T, window, **sizes, BM=config.M, ROWS=PARTS,
            num_warps=4,
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
        *lengths, window, scale, k.numel(), *strides, **sizes, BM=config.M, BN=config.N, STAGES=config.stages,
        CAP=softcap, GROUP=group, HEADS=heads, PRECISION=precision, EDGE=edge, num_warps=config.warps,
    )  # fmt: skip
    if summed > 1:
        dk, dv = (x.sum(0).to(k.dtype) for x in (dk, dv))
    return dq, dk, dv


def _setup_context(ctx, inputs, output):
    q, k, v, cu_seqlens, *ctx.reach = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def _backward(ctx, do, dlse):
    q, k, v, o, lse, cu_seqlens = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(o)
    *reach, edge = ctx.reach
    grads = window_backward(do, dlse, q, k, v, o, lse, cu_seqlens, *reach, None, None, 0, edge)
    return *grads, None, None, None, None, None, None


gradient("window_forward", _backward, _setup_context)
_attention = differentiable(window_forward, _backward, _setup_context)


def window_attention_triton(call: WindowCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`deltanet_kernels.window_attention` in Triton, for checked arguments.

    Raises:
        NotImplementedError: head sizes over 256, or dtypes other than float32, bfloat16, float16.
    """
    D = call.q.shape[3]
    check_supported(call.q.dtype, D, D)
    reach = call.window, call.sinks, call.factor, call.softcap, call.edge
    o, lse = _attention(call.q, call.k, call.v, call.cu_seqlens, *reach)
    return o, lse
