"""Chunked gated delta rule on CUDA: gradients, and the entry point.

chunk_forward.py and chunk_backward.py hold the launches. The package docstring says which kernel serves which call and
defines the symbols.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch

from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.common.device import multiprocessors
from deltanet_kernels.common.registration import differentiable, gradient
from deltanet_kernels.common.sizes import cdiv
from deltanet_kernels.gated_delta_rule.chips import ChunkConfig
from deltanet_kernels.gated_delta_rule.chunk_backward import chunk_backward
from deltanet_kernels.gated_delta_rule.chunk_forward import Kept, chunk_forward, chunk_without_gradients
from deltanet_kernels.gated_delta_rule.config import MIN_HALF_SIZE, check_supported
from deltanet_kernels.gated_delta_rule.launch_plan import pinned_config
from deltanet_kernels.gated_delta_rule.segments import segments_for


def _setup_context(ctx, inputs, output):
    (
        q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias, scale, norm, sigmoid, final, _, precision,
        segments, erase,
    ) = inputs  # fmt: skip
    ctx.save_for_backward(q, k, v, g, beta, cu_seqlens, A_log, dt_bias, *Kept(*output[2:]))
    ctx.options = (scale, norm, sigmoid, initial_state is not None, precision, segments, erase)
    ctx.final = final
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dht, *_):
    q, k, v, g, beta, cu_seqlens, A_log, dt_bias, *kept = ctx.saved_tensors
    if do is None:
        do = q.new_zeros(q.shape[0], q.shape[1], max(q.shape[2], v.shape[2]), v.shape[3])
    dq, dk, dv, dg, dbeta, dh0, dA, dbias = chunk_backward(
        do, dht if ctx.final else None, q, k, v, g, beta, cu_seqlens, A_log, dt_bias,
        *Kept(*kept), *ctx.options,
    )  # fmt: skip
    gate, initial = A_log is not None, ctx.options[3]
    return (
        dq, dk, dv, dg, dbeta, dh0 if initial else None, None, dA if gate else None, dbias if gate else None,
        *[None] * 8,
    )  # fmt: skip


gradient("chunk_forward", _backward, _setup_context)
_chunk = differentiable(chunk_forward, _backward, _setup_context)


def _segments(q: torch.Tensor, v: torch.Tensor, rows: int, config: ChunkConfig) -> int:
    programs = rows * v.shape[2] * cdiv(v.shape[3], min(config.state_BV, 64))
    return segments_for(programs, q.shape[0] * q.shape[1] // (rows * config.C), multiprocessors(q.device))


def chunk_gated_delta_rule_triton(
    call: RuleCall, segments: int | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`deltanet_kernels.chunk_gated_delta_rule` in Triton, for checked arguments.

    Float32 inputs are multiplied as `torch.set_float32_matmul_precision` says ("highest": IEEE float32); so are heads
    smaller than 16, in every dtype. Runs on the current stream, never waits for the device, and gives the same bits
    every time.

    Args:
        call: the arguments.
        segments: the number of segments per sequence (segments.py), chosen from the sizes by default.

    Returns:
        o [B, T, HO, V] in the dtype of v, and the final state [N, HV, K, V] float32 or None.

    Raises:
        NotImplementedError: head sizes over 256, dtypes other than float32, bfloat16, float16.
    """
    q, k, v = call.q, call.k, call.v
    check_supported(q.dtype, q.shape[3], v.shape[3])
    dtype = v.dtype
    if min(q.shape[3], v.shape[3]) < MIN_HALF_SIZE:
        q, k, v = q.float(), k.float(), v.float()
    rows = q.shape[0] if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    if segments is None:
        segments = _segments(q, v, rows, pinned_config(k, v))
    gate, keep = call.use_gate_in_kernel, call.needs_gradients()
    o, ht, *_ = (_chunk if keep else chunk_without_gradients)(
        q, k, v, call.g, call.beta, call.initial_state, call.cu_seqlens,
        call.A_log if gate else None, call.dt_bias if gate else None, call.factor, call.use_qk_l2norm_in_kernel,
        call.use_beta_sigmoid_in_kernel, call.output_final_state, keep, "auto", segments,
        call.erase,
    )  # fmt: skip
    return o.to(dtype), ht if call.output_final_state else None
