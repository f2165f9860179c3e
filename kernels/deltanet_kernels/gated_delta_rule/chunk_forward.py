"""Forward pass of the chunked gated delta rule on CUDA: its launches, as the operator `chunk_forward`.

scores.py and solve.py, or hopper/solve.py for both, then states.py. `Kept` lists what the backward pass reads.

Short names: Tm is T, h the states S [chunks, HV, V, K], vn the values V', ht the final state.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any, NamedTuple

import torch

from deltanet_kernels.common.device import multiprocessors
from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import Registered, operator
from deltanet_kernels.common.sizes import cdiv
from deltanet_kernels.gated_delta_rule.chips import HOPPER_SOLVE, SCORES
from deltanet_kernels.gated_delta_rule.config import slices
from deltanet_kernels.gated_delta_rule.hopper import launches
from deltanet_kernels.gated_delta_rule.launch_plan import (
    LaunchPlan,
    kept_dtype,
    launch_plan,
    pinned_config,
    unit_stride,
    zero_tail,
)
from deltanet_kernels.gated_delta_rule.row_factors import ChunkInputs, ChunkTensors, erase_flags
from deltanet_kernels.gated_delta_rule.scores import scores
from deltanet_kernels.gated_delta_rule.segments import chunk_spans, compose, composes
from deltanet_kernels.gated_delta_rule.solve import invert
from deltanet_kernels.gated_delta_rule.states import outputs_kernel, states_kernel


class ChunkForward(NamedTuple):
    """The arguments of `chunk_forward`: those of a `RuleCall`, and how it is computed."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    scale: float
    norm: bool
    sigmoid: bool
    final: bool
    """Compute the final state."""
    keep: bool
    """Return what the backward pass reads."""
    precision: str
    segments: int
    erase: str = "decayed"


class Kept(NamedTuple):
    """The results of `chunk_forward` after the output and the final state, which the backward pass reads."""

    factors: torch.Tensor
    """Row factors [6 HV + 4 HO, B*T], float32."""
    T: torch.Tensor
    """(I + L)^-1 [chunks, HV, C, C]; empty if L is 0."""
    P: torch.Tensor
    """Scores [chunks, HO, C, C]."""
    S: torch.Tensor
    """State entering each chunk, transposed [chunks, HV, V, K]."""
    values: torch.Tensor
    """V' [B, T, HV, V]."""
    M: torch.Tensor
    """Linear maps of composed segments [rows, segments, HV, K, K], float32."""
    spans: torch.Tensor
    """Chunks that each pass processes per segment [rows, HV, segments, 5, 2], int32 (segments.py)."""


def _fake_chunk_forward(call: ChunkForward):
    q, k, v, *_, cu_seqlens = call[:7]
    final, keep, segments, erase = call.final, call.keep, call.segments, call.erase
    (B, T, HQ, K), HV, V = q.shape, v.shape[2], v.shape[3]
    C = pinned_config(k, v).C
    rows = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    count = B * ((T + C - 1) // C) if cu_seqlens is None else (T + C - 1) // C + rows
    kept = kept_dtype(k.dtype)
    return (
        q.new_empty(B, T, max(HQ, HV), V),
        q.new_empty((rows, HV, K, V) if final else (0,), dtype=torch.float32),
        q.new_empty((6 * HV + 4 * max(HQ, HV), B * T) if keep else (0,), dtype=torch.float32),
        k.new_empty((count, HV, C, C) if keep and erase_flags(erase)["READ"] else (0,)),
        k.new_empty((count, max(HQ, HV), C, C) if keep else (0,)),
        k.new_empty((count, HV, V, K) if keep else (0,), dtype=kept),
        k.new_empty((B, T, HV, V) if keep else (0,), dtype=kept),
        q.new_empty((rows, segments, HV, K, K) if keep and composes(segments, K) else (0,), dtype=torch.float32),
        q.new_empty((rows, HV, segments, 5, 2) if keep and segments > 1 else (0,), dtype=torch.int32),
    )


def scores_and_inverse(inputs: ChunkInputs, plan: LaunchPlan) -> ChunkTensors:
    """The tensors of every chunk; L, as large as two of T, is freed on return."""
    config = plan.config
    if plan.serving(SCORES, inputs.q, inputs.k) is HOPPER_SOLVE:
        return launches.launch_solve(inputs)
    P, L, factors, bounds = scores(inputs, plan.full, plan.precision, config.score_warps)
    if not plan.form["READ"]:
        return ChunkTensors(P, None, factors, bounds)
    T = invert(L, inputs.k.dtype, inputs.q.shape[1], inputs.chunks, plan.precision, config.solve_warps)
    return ChunkTensors(P, T, factors, bounds)


def _forward(call: ChunkForward) -> tuple[Any, ...]:
    """As `chunk_forward`, with None for what is empty."""
    q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias, scale, norm, sigmoid, final, keep, *_ = call
    precision, segments, erase = call[14:]
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    g, beta = g.contiguous(), beta.contiguous()
    initial_state = None if initial_state is None else initial_state.contiguous()
    plan = launch_plan(q, k, v, cu_seqlens, precision, erase)
    config, chunks, flags = plan.config, plan.chunks, plan.flags
    (B, T, HQ, K), HV, V = q.shape, v.shape[2], v.shape[3]
    HO = max(HQ, HV)
    P, Tm, factors, bounds = scores_and_inverse(
        ChunkInputs(q, k, g, beta, A_log, dt_bias, chunks, scale, sigmoid, norm, segments > 1, erase), plan
    )

    o = q.new_empty(B, T, HO, V)
    ht = q.new_empty(chunks.rows, HV, K, V, dtype=torch.float32) if final else None
    fused = HQ <= HV
    stored = keep or not fused
    h = k.new_empty(chunks.count, HV, V, K, dtype=kept_dtype(k.dtype)) if stored else None
    vn = k.new_empty(B, T, HV, V, dtype=kept_dtype(k.dtype)) if stored else None
    composed = composes(segments, K)
    M = None
    if segments > 1:  # the kernel that could write M is compiled with it, composed or not
        M = q.new_empty((chunks.rows, segments, HV, K, K) if composed else (0,), dtype=torch.float32)
    inputs = (q, k, v, factors, Tm, P)
    where = (chunks.cu_seqlens, chunks.first_chunk, T, B * T)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    programs = chunks.rows * segments * HV
    BV, warps = slices(config.state_BV, config.state_warps, V, chunks.rows * HV, multiprocessors(q.device))
    common = {
        **plan.sizes, **flags, "BV": BV, "SEGMENTS": segments, "COMPOSED": composed,
        "STAGES": config.state_stages, "num_warps": warps, "READ": plan.form["READ"],
    }  # fmt: skip
    start, table = initial_state, None
    if segments > 1:
        assert bounds is not None
        table = chunk_spans(bounds, chunks, segments, composed)
        start = q.new_empty(chunks.rows, segments, HV, K, V, dtype=torch.float32)
        launch(
            states_kernel, programs * (cdiv(V, BV) + (cdiv(K, BV) if composed else 0)),
            *inputs, None, o, h, vn, start, M, table, *where, *strides, **common,
            INITIAL=False, FINAL=True, OUTPUT=False, KEEP=False, TRANSITION=True,
        )  # fmt: skip
        compose(M if composed else None, start, initial_state, table, False, plan.precision)
    launch(
        states_kernel, programs * cdiv(V, BV),
        *inputs, start, o, h, vn, ht, M, table, *where, *strides, **common,
        INITIAL=start is not None, FINAL=final, OUTPUT=fused, KEEP=stored, TRANSITION=False,
    )  # fmt: skip
    if not fused and chunks.count:
        launch(
            outputs_kernel, chunks.count * HO * cdiv(V, config.output_BV),
            q, factors, P, h, vn, o, chunks.cu_seqlens, chunks.row_of_chunk, chunks.first_chunk, T, B * T,
            *strides[:3], HV=HV, HQ=HQ, K=K, V=V, BK=plan.sizes["BK"], **flags, BV=config.output_BV,
            num_warps=config.output_warps,
        )  # fmt: skip
    zero_tail(chunks, o)
    return o, ht, *((factors, Tm, P, h, vn, M, table) if keep else (None,) * 7)


@operator(_fake_chunk_forward)
def chunk_forward(
    call: ChunkForward,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
    torch.Tensor,
]:  # fmt: skip
    """o, the final state (empty unless `final`), and the fields of `Kept` (empty unless `keep`)."""
    o, ht, *kept = _forward(call)
    q, k = call.q, call.k
    wide = kept_dtype(k.dtype)
    dtypes = (torch.float32, k.dtype, k.dtype, wide, wide, torch.float32, torch.int32)
    kept = [q.new_empty(0, dtype=dtype) if x is None else x for x, dtype in zip(kept, dtypes, strict=True)]
    return o, q.new_empty(0, dtype=torch.float32) if ht is None else ht, *Kept(*kept)


chunk_without_gradients = Registered(_forward, chunk_forward.op, chunk_forward.calls)
