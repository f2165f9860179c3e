"""Forward pass of the chunked gated delta rule on CUDA: its launches, as the operator `chunk_forward`.

scores.py and solve.py, or hopper/solve.py for both, then states.py. `Kept` lists what the backward pass reads.

Short names: Tm is T, h the states S [chunks, HV, V, K], vn the values V', ht the final state.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any, NamedTuple

import torch

from deltanet_kernels.common.config import slices
from deltanet_kernels.common.device import multiprocessors
from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import Registered, operator
from deltanet_kernels.common.rows import unit_stride
from deltanet_kernels.common.sizes import cdiv
from deltanet_kernels.gated_delta_rule.chips import HOPPER_SOLVE, SCORES
from deltanet_kernels.gated_delta_rule.hopper import launches
from deltanet_kernels.gated_delta_rule.launch_plan import LaunchPlan, kept_dtype, launch_plan, pinned_config, zero_tail
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


def dense(call: ChunkForward) -> ChunkForward:
    """The call with adjacent channels, gates and states."""
    q, k, v = unit_stride(call.q), unit_stride(call.k), unit_stride(call.v)
    state = None if call.initial_state is None else call.initial_state.contiguous()
    return call._replace(q=q, k=k, v=v, g=call.g.contiguous(), beta=call.beta.contiguous(), initial_state=state)


class Results(NamedTuple):
    """Outputs of the state and the output kernels."""

    o: torch.Tensor
    """[B, T, HO, V]."""
    final: torch.Tensor | None
    """[rows, HV, K, V], float32; None unless wanted."""
    S: torch.Tensor | None
    """As in `Kept`; None where neither the backward pass nor `outputs` reads it."""
    values: torch.Tensor | None
    """The same."""


class Starts(NamedTuple):
    """Where the programs of the state kernel start."""

    states: torch.Tensor | None
    """[rows, segments, HV, K, V] float32, or the initial state; None for zeros."""
    M: torch.Tensor | None = None
    """As in `Kept`. With segments the kernel that could write it is compiled with it, composed or not."""
    spans: torch.Tensor | None = None
    """As in `Kept`."""


def _is_fused(call: ChunkForward) -> bool:
    """Whether the state kernel writes the outputs too."""
    return call.q.shape[2] <= call.v.shape[2]


def empty_results(call: ChunkForward, plan: LaunchPlan) -> Results:
    """The results, not yet computed."""
    (B, T, HQ, K), (HV, V), kept = call.q.shape, call.v.shape[2:], kept_dtype(call.k.dtype)
    stored = call.keep or not _is_fused(call)
    return Results(
        o=call.q.new_empty(B, T, max(HQ, HV), V),
        final=call.q.new_empty(plan.chunks.rows, HV, K, V, dtype=torch.float32) if call.final else None,
        S=call.k.new_empty(plan.chunks.count, HV, V, K, dtype=kept) if stored else None,
        values=call.k.new_empty(B, T, HV, V, dtype=kept) if stored else None,
    )


def states(
    call: ChunkForward,
    plan: LaunchPlan,
    chunk: ChunkTensors,
    results: Results,
    starts: Starts,
    transition: bool = False,
) -> None:
    """The states, and the outputs where no more than one query head reads a state.

    With `transition` only the N of each segment, as final states, and M (segments.py).
    """
    q, k, v, segments, config, chunks = call.q, call.k, call.v, call.segments, plan.config, plan.chunks
    (B, T, _, K), (HV, V), composed = q.shape, v.shape[2:], composes(segments, q.shape[3])
    BV, warps = slices(config.state_BV, config.state_warps, V, chunks.rows * HV, multiprocessors(q.device))
    columns = cdiv(V, BV) + (cdiv(K, BV) if transition and composed else 0)
    launch(
        states_kernel, chunks.rows * segments * HV * columns,
        q, k, v, chunk.factors, chunk.T, chunk.P, starts.states, results.o, results.S, results.values, results.final,
        starts.M, starts.spans, chunks.cu_seqlens, chunks.first_chunk, T, B * T, *q.stride()[:3], *k.stride()[:3],
        *v.stride()[:3], INITIAL=starts.states is not None, FINAL=results.final is not None,
        OUTPUT=_is_fused(call) and not transition, KEEP=results.S is not None and not transition,
        TRANSITION=transition, SEGMENTS=segments, COMPOSED=composed, STAGES=config.state_stages,
        FORM=plan.chunk_form(BV), num_warps=warps,
    )  # fmt: skip


def segment_starts(call: ChunkForward, plan: LaunchPlan, chunk: ChunkTensors, results: Results) -> Starts:
    """The states that enter the segments (segments.py)."""
    if chunk.bounds is None:
        return Starts(call.initial_state)
    segments, chunks, (HV, V), K = call.segments, plan.chunks, call.v.shape[2:], call.k.shape[3]
    composed = composes(segments, K)
    M = call.q.new_empty((chunks.rows, segments, HV, K, K) if composed else (0,), dtype=torch.float32)
    entering = call.q.new_empty(chunks.rows, segments, HV, K, V, dtype=torch.float32)
    spans = chunk_spans(chunk.bounds, chunks, segments, composed)
    starts = Starts(entering, M, spans)
    states(call, plan, chunk, results._replace(final=entering), starts._replace(states=None), transition=True)
    compose(M if composed else None, entering, call.initial_state, spans, False, plan.precision)
    return starts


def outputs(call: ChunkForward, plan: LaunchPlan, chunk: ChunkTensors, results: Results) -> None:
    """The outputs that `states` has not written."""
    q, config, chunks = call.q, plan.config, plan.chunks
    if _is_fused(call) or not chunks.count:
        return
    (B, T, HQ, K), (HV, V) = q.shape, call.v.shape[2:]
    launch(
        outputs_kernel, chunks.count * HQ * cdiv(V, config.output_BV),
        q, chunk.factors, chunk.P, results.S, results.values, results.o, chunks.cu_seqlens, chunks.row_of_chunk,
        chunks.first_chunk, T, B * T, *q.stride()[:3], HV=HV, HQ=HQ, K=K, V=V, BK=plan.sizes["BK"], **plan.flags,
        BV=config.output_BV, num_warps=config.output_warps,
    )  # fmt: skip


def _forward(call: ChunkForward) -> tuple[Any, ...]:
    """As `chunk_forward`, with None for what is empty."""
    call = dense(call)
    plan = launch_plan(call.q, call.k, call.v, call.cu_seqlens, call.precision, call.erase)
    chunk = scores_and_inverse(
        ChunkInputs(
            call.q, call.k, call.g, call.beta, call.A_log, call.dt_bias, plan.chunks, call.scale, call.sigmoid,
            call.norm, call.segments > 1, call.erase,
        ),
        plan,
    )  # fmt: skip
    results = empty_results(call, plan)
    starts = segment_starts(call, plan, chunk, results)
    states(call, plan, chunk, results, starts)
    outputs(call, plan, chunk, results)
    zero_tail(plan.chunks, results.o)
    kept = (chunk.factors, chunk.T, chunk.P, results.S, results.values, starts.M, starts.spans)
    return results.o, results.final, *(kept if call.keep else (None,) * 7)


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
