"""Backward pass of the chunked gated delta rule on CUDA: its launches, as the operator `chunk_backward`.

query_sums.py where query heads share states, states_backward.py, then gradients_pairs.py and gradients_inputs.py, or
gradients_64.py or hopper/gradients_128.py for both.

Short names: Tm is T, h the states S [chunks, HV, V, K], vn the values V', dh and dw the gradients of S and W, ht and
dht the final state and its gradient.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch

from deltanet_kernels.arguments import Upstream
from deltanet_kernels.common.config import slices, tile_width
from deltanet_kernels.common.device import multiprocessors
from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import operator
from deltanet_kernels.common.rows import unit_stride
from deltanet_kernels.common.sizes import cdiv
from deltanet_kernels.gated_delta_rule.chips import GRADIENTS, GRADIENTS_64, HOPPER_GRADIENTS, summed_stages
from deltanet_kernels.gated_delta_rule.chunk_forward import ChunkForward, Kept
from deltanet_kernels.gated_delta_rule.gradients_64 import joint_gradients_kernel
from deltanet_kernels.gated_delta_rule.gradients_inputs import input_gradients_kernel
from deltanet_kernels.gated_delta_rule.gradients_pairs import pair_gradients_kernel
from deltanet_kernels.gated_delta_rule.hopper import launches
from deltanet_kernels.gated_delta_rule.launch_plan import LaunchPlan, launch_plan, zero_tail
from deltanet_kernels.gated_delta_rule.query_sums import query_sums_kernel
from deltanet_kernels.gated_delta_rule.segments import compose
from deltanet_kernels.gated_delta_rule.states_backward import states_backward_kernel


def _fake_chunk_backward(upstream: Upstream, call: ChunkForward, kept: Kept):
    q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias = call[:9]
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = (0,) if initial_state is None else (rows, v.shape[2], k.shape[3], v.shape[3])
    dA = q.new_empty(0, dtype=torch.float32) if A_log is None else torch.empty_like(A_log)
    dbias = q.new_empty(0, dtype=torch.float32) if dt_bias is None else torch.empty_like(dt_bias)
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, g, beta)]
    return (*grads, q.new_empty(state, dtype=torch.float32), dA, dbias)


def _query_sums(q: torch.Tensor, factors: torch.Tensor, P: torch.Tensor, do: torch.Tensor, plan: LaunchPlan):
    """A [chunks, HV, V, C] and R [chunks, HV, V, K] of query_sums.py; None where no query heads share a state."""
    config, chunks, HV = plan.config, plan.chunks, plan.sizes["HV"]
    (HQ, K), V, C = q.shape[2:], do.shape[3], config.C
    if HQ <= HV or not chunks.count:
        return None, None
    A, R = (q.new_empty(chunks.count, HV, V, size, dtype=torch.float32) for size in (C, K))
    BV = config.pair_BV
    launch(
        query_sums_kernel, chunks.count * HV * cdiv(V, BV),
        q, factors, P, do, A, R, chunks.cu_seqlens, chunks.row_of_chunk, chunks.first_chunk, q.shape[1],
        q.shape[0] * q.shape[1], *q.stride()[:3], *do.stride()[:3], HV=HV, HQ=HQ, K=K, V=V, BK=plan.sizes["BK"],
        BV=BV, **plan.flags, num_warps=config.pair_warps, num_stages=1,
    )  # fmt: skip
    return A, R


@operator(_fake_chunk_backward)
def chunk_backward(
    upstream: Upstream, call: ChunkForward, kept: Kept
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:
    """Gradients of q, k, v, g, beta, the initial state, A_log and dt_bias; empty for absent inputs.

    Of the initial state it reads only whether there is one.
    """
    (do, dht), (factors, Tm, P, h, vn, M, table) = upstream, kept
    q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias, scale, norm, sigmoid, *_ = call
    precision, segments, initial = call.precision, call.segments, initial_state is not None
    q, k, v, do, g = unit_stride(q), unit_stride(k), unit_stride(v), unit_stride(do), g.contiguous()
    dht = None if dht is None else dht.contiguous()
    plan = launch_plan(q, k, v, cu_seqlens, precision, call.erase)
    config, chunks = plan.config, plan.chunks
    (B, T, HQ, K), HV, V = q.shape, v.shape[2], v.shape[3]
    dh, dw = torch.empty_like(h), torch.empty_like(vn)
    dh0 = q.new_empty((chunks.rows, HV, K, V) if initial else (0,), dtype=torch.float32)
    where = (chunks.cu_seqlens, chunks.first_chunk, T, B * T)
    strides = (*q.stride()[:3], *k.stride()[:3], *do.stride()[:3])
    BV, warps = slices(config.grad_BV, config.grad_warps, V, chunks.rows * HV, multiprocessors(q.device))
    programs = chunks.rows * segments * HV * cdiv(V, BV)
    stages = config.grad_stages if HQ <= HV else summed_stages(config, plan.sizes["BK"], BV, k.element_size())
    common = {"SEGMENTS": segments, "STAGES": stages, "FORM": plan.chunk_form(BV), "num_warps": warps}
    inputs = (q, k, factors, Tm, P, do, *_query_sums(q, factors, P, do, plan))
    start = dht
    if segments > 1:
        start = q.new_empty(chunks.rows, segments, HV, K, V, dtype=torch.float32)
        launch(
            states_backward_kernel, programs,
            *inputs, None, dh, dw, start, table, *where, *strides, **common, FINAL=False, INITIAL=True, KEEP=False,
        )  # fmt: skip
        compose(M if M.numel() else None, start, dht, table, True, plan.precision)
    launch(
        states_backward_kernel, programs,
        *inputs, start, dh, dw, dh0, table, *where, *strides, **common,
        FINAL=start is not None, INITIAL=initial, KEEP=True,
    )  # fmt: skip
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dg, dbeta = torch.empty_like(g), torch.empty(beta.shape, dtype=beta.dtype, device=beta.device)
    gate = A_log is not None
    sums = q.new_zeros((chunks.count, HV, 2) if gate else (0,), dtype=torch.float32)
    kernel = plan.serving(GRADIENTS, q, k, do)
    if chunks.count and kernel is HOPPER_GRADIENTS:
        launches.launch_gradients(
            q, k, v, factors, P, do, h, dh, vn, dw, g, A_log, dt_bias, dq, dk, dv, dg, dbeta, sums,
            scale, norm, sigmoid,
        )  # fmt: skip
    elif chunks.count:
        chunk_of = (chunks.cu_seqlens, chunks.row_of_chunk, chunks.first_chunk)
        Z, E = torch.empty_like(P), torch.empty_like(Tm)
        if kernel is GRADIENTS_64:
            launch(
                joint_gradients_kernel, chunks.count * HV,
                q, k, v, factors, P, do, h, dh, vn, dw, Z, E, g, A_log, dt_bias, dq, dk, dv, dg, dbeta, sums, *chunk_of,
                scale, T, B * T, *strides, *v.stride()[:3],
                FORM=plan.chunk_form(tile_width(V, v.dtype), NORM=norm, SIGMOID=sigmoid),
                num_warps=4, num_stages=1, maxnreg=255,
            )  # fmt: skip
        else:
            dG = q.new_empty(HV, B * T, dtype=torch.float32)
            launch(
                pair_gradients_kernel, chunks.count * HV,
                k, v, factors, P, do, h, vn, dw, Z, E, dG, dv, dbeta, *chunk_of, scale, T, B * T,
                *strides[3:], *v.stride()[:3], FORM=plan.chunk_form(config.pair_BV, SIGMOID=sigmoid),
                num_warps=config.pair_warps, num_stages=1, maxnreg=config.pair_registers,
            )  # fmt: skip
            launch(
                input_gradients_kernel, chunks.count * k.shape[2],
                q, k, factors, do, h, dh, vn, dw, Z, E, dG, g, A_log, dt_bias, dq, dk, dg, sums, *chunk_of,
                T, B * T, *strides, FORM=plan.chunk_form(config.input_BV, NORM=norm),
                num_warps=config.input_warps, num_stages=1, maxnreg=config.input_registers,
            )  # fmt: skip
    zero_tail(chunks, dq, dk, dv, dg, dbeta)
    total = sums.sum(0) if gate else sums.view(0, 2)
    dA, dbias = (
        total[:, j].to(torch.float32 if x is None else x.dtype, copy=True) for j, x in enumerate((A_log, dt_bias))
    )
    return dq, dk, dv, dg, dbeta, dh0, dA, dbias
