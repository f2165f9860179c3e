"""Chunked gated delta rule on CUDA: gradients, and the entry point.

chunk_forward.py and chunk_backward.py hold the launches. chips.KERNELS says which kernel serves which call; the package
docstring defines the symbols.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch

from deltanet_kernels.arguments import RuleCall, Upstream
from deltanet_kernels.common.config import MIN_HALF_SIZE, check_supported
from deltanet_kernels.common.device import multiprocessors
from deltanet_kernels.common.registration import differentiable_call
from deltanet_kernels.common.sizes import cdiv
from deltanet_kernels.gated_delta_rule.chips import ChunkConfig
from deltanet_kernels.gated_delta_rule.chunk_backward import chunk_backward
from deltanet_kernels.gated_delta_rule.chunk_forward import ChunkForward, Kept, chunk_forward, chunk_without_gradients
from deltanet_kernels.gated_delta_rule.launch_plan import pinned_config
from deltanet_kernels.gated_delta_rule.segments import segments_for

DIFFERENTIATED = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
"""The fields of a call whose gradients `chunk_backward` returns, in its order."""


_chunk = differentiable_call(chunk_forward, chunk_backward, DIFFERENTIATED, Upstream, Kept, without=["initial_state"])


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
    forward = ChunkForward(
        q, k, v, call.g, call.beta, call.initial_state, call.cu_seqlens,
        call.A_log if gate else None, call.dt_bias if gate else None, call.factor, call.use_qk_l2norm_in_kernel,
        call.use_beta_sigmoid_in_kernel, call.output_final_state, keep, "auto", segments, call.erase,
    )  # fmt: skip
    o, ht, *_ = (_chunk if keep else chunk_without_gradients)(forward)
    return o.to(dtype), ht if call.output_final_state else None
