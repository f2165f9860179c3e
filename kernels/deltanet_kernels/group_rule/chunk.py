"""The rule read at boundaries on CUDA: the launches, their registration with PyTorch, and the entry point.

Chunks are those of gated_delta_rule/: 64 tokens, 32 in float32. In bfloat16, with heads of 128 and no shared heads, the
forward pass moves 24 KiB per chunk and head before the states (keys in, T out) and 72 KiB with them, where the rule
itself moves 48 and 80. Chunks of 32 tokens would need no state in the middle of a chunk, but twice the steps in
sequence and, for the backward pass, twice the states in memory, each as large as the queries and keys of 64 tokens.

Short names as in gated_delta_rule/chunk_backward.py.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any, NamedTuple

import torch

from deltanet_kernels.arguments import Upstream
from deltanet_kernels.common.config import MIN_HALF_SIZE, check_supported, slices, tile_width
from deltanet_kernels.common.device import multiprocessors
from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import Registered, differentiable_call, operator
from deltanet_kernels.common.rows import unit_stride
from deltanet_kernels.common.sizes import cdiv
from deltanet_kernels.gated_delta_rule.chips import GRADIENTS, GRADIENTS_64, HOPPER_GRADIENTS, ChunkConfig
from deltanet_kernels.gated_delta_rule.chunk_forward import ChunkForward, Results, scores_and_inverse, segment_starts
from deltanet_kernels.gated_delta_rule.gradients_64 import joint_gradients_kernel
from deltanet_kernels.gated_delta_rule.gradients_inputs import input_gradients_kernel
from deltanet_kernels.gated_delta_rule.gradients_pairs import pair_gradients_kernel
from deltanet_kernels.gated_delta_rule.hopper import launches
from deltanet_kernels.gated_delta_rule.launch_plan import kept_dtype, launch_plan, pinned_config
from deltanet_kernels.gated_delta_rule.row_factors import ChunkInputs
from deltanet_kernels.gated_delta_rule.segments import MAX_COMPOSED_KEY, compose, composes
from deltanet_kernels.group_rule.calls import GROUP, GroupRuleCall
from deltanet_kernels.group_rule.gradients_queries import query_gradients_kernel
from deltanet_kernels.group_rule.outputs import group_outputs_kernel
from deltanet_kernels.group_rule.query_sums import group_sums_kernel
from deltanet_kernels.group_rule.states import group_states_kernel
from deltanet_kernels.group_rule.states_backward import group_states_backward_kernel

DIFFERENTIATED = ("q", "k", "v", "g", "beta", "initial_state")
"""The fields of a call whose gradients `group_backward` returns, in its order."""


class GroupForward(NamedTuple):
    """The arguments of `group_forward`: those of a `GroupRuleCall`, and how it is computed."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor | None
    scale: float
    norm: bool
    final: bool
    """Compute the final state."""
    keep: bool
    """Return what the backward pass reads."""
    segments: int
    """Per sequence (gated_delta_rule/segments.py)."""
    cu_seqlens: torch.Tensor | None = None
    """Without `keep`."""


class Kept(NamedTuple):
    """The results of `group_forward` after the output and the final state, which the backward pass reads."""

    factors: torch.Tensor
    """Row factors [6 HV + 4 HO, B*T], float32."""
    T: torch.Tensor
    """(I + L)^-1 [chunks, HV, C, C]."""
    S: torch.Tensor
    """State entering each chunk, transposed [chunks, HV, V, K]."""
    values: torch.Tensor
    """V' [B, T, HV, V]."""
    M: torch.Tensor
    """Linear maps of composed segments [B, segments, HV, K, K], float32."""
    spans: torch.Tensor
    """Chunks that each pass processes per segment [B, HV, segments, 5, 2], int32."""


def _fake_forward(call: GroupForward):
    q, k, v, _, _, _, _, _, final, keep, segments, cu_seqlens = call
    (B, T, HQ, K), (HV, V) = q.shape, v.shape[2:]
    rows = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    C, HO, kept = pinned_config(k, v).C, max(HQ, HV), kept_dtype(k.dtype)
    count = B * ((T + C - 1) // C)
    return (
        q.new_empty(B, T, HO, V),
        q.new_empty((rows, HV, K, V) if final else (0,), dtype=torch.float32),
        q.new_empty((6 * HV + 4 * HO, B * T) if keep else (0,), dtype=torch.float32),
        k.new_empty((count, HV, C, C) if keep else (0,)),
        k.new_empty((count, HV, V, K) if keep else (0,), dtype=kept),
        k.new_empty((B, T, HV, V) if keep else (0,), dtype=kept),
        q.new_empty((B, segments, HV, K, K) if keep and composes(segments, K) else (0,), dtype=torch.float32),
        q.new_empty((B, HV, segments, 5, 2) if keep and segments > 1 else (0,), dtype=torch.int32),
    )


def _forward(call: GroupForward) -> tuple[Any, ...]:
    """As `group_forward`, with None for what is empty."""
    q, k, v, g, beta, start, scale, norm, final, keep, segments, cu_seqlens = call
    q, k, v, g, beta = unit_stride(q), unit_stride(k), unit_stride(v), g.contiguous(), beta.contiguous()
    start = None if start is None else start.contiguous()
    (B, T, HQ, K), (HV, V) = q.shape, v.shape[2:]
    HO, stored = max(HQ, HV), keep or HQ > HV
    # The first stage does not read the queries: how many heads they have does not matter to it.
    plan = launch_plan(k, k, v, cu_seqlens, "auto", "decayed")
    config, chunks = plan.config, plan.chunks
    sizes = plan.sizes | plan.flags | {"HQ": HQ}
    inputs = ChunkInputs(q, k, g, beta, None, None, chunks, scale, False, norm, segments > 1, scores=False)
    chunk = scores_and_inverse(inputs, plan)
    o = v.new_empty(B, T, HO, V)
    rule = ChunkForward(
        q, k, v, g, beta, start, cu_seqlens, None, None, scale, norm, False, final, keep, "auto", segments
    )  # fmt: skip
    starts = segment_starts(rule, plan, chunk, Results(o, None, None, None))
    ht = q.new_empty(chunks.rows, HV, K, V, dtype=torch.float32) if final else None
    h = k.new_empty(chunks.count, HV, V, K, dtype=kept_dtype(k.dtype)) if stored else None
    vn = k.new_empty(B, T, HV, V, dtype=kept_dtype(k.dtype)) if stored else None
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    BV, warps = slices(config.state_BV, config.state_warps, V, chunks.rows * HV, multiprocessors(q.device))
    launch(
        group_states_kernel, chunks.rows * segments * HV * cdiv(V, BV),
        q, k, v, chunk.factors, chunk.T, starts.states, o, h, vn, ht, starts.spans, chunks.cu_seqlens,
        chunks.first_chunk, scale, T, B * T, *strides, **sizes, BV=BV, NORM=norm, INITIAL=starts.states is not None,
        FINAL=final, OUTPUT=HQ <= HV, KEEP=stored, SEGMENTS=segments, STAGES=config.state_stages, num_warps=warps,
    )  # fmt: skip
    if HQ > HV:
        BV = config.output_BV
        launch(
            group_outputs_kernel, chunks.count * HV * cdiv(V, BV),
            q, k, chunk.factors, h, vn, o, chunks.cu_seqlens, chunks.row_of_chunk, chunks.first_chunk, scale, T, B * T,
            *strides[:6], **sizes, BV=BV, NORM=norm, KEEP=keep, num_warps=config.output_warps, num_stages=1,
        )  # fmt: skip
    return o, ht, *((chunk.factors, chunk.T, h, vn, starts.M, starts.spans) if keep else (None,) * 6)


@operator(_fake_forward)
def group_forward(
    call: GroupForward,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:  # fmt: skip
    """o, the final state (empty unless `final`), and the fields of `Kept` (empty unless `keep`)."""
    o, ht, *kept = _forward(call)
    q, k = call.q, call.k
    wide = kept_dtype(k.dtype)
    dtypes = (torch.float32, k.dtype, wide, wide, torch.float32, torch.int32)
    kept = [q.new_empty(0, dtype=dtype) if x is None else x for x, dtype in zip(kept, dtypes, strict=True)]
    return o, q.new_empty(0, dtype=torch.float32) if ht is None else ht, *Kept(*kept)


_without_gradients = Registered(_forward, group_forward.op, group_forward.calls)


def _fake_backward(upstream: Upstream, call: GroupForward, kept: Kept):
    q, k, v, g, beta, initial_state = call[:6]
    state = (0,) if initial_state is None else (q.shape[0], v.shape[2], k.shape[3], v.shape[3])
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, g, beta)]
    return (*grads, q.new_empty(state, dtype=torch.float32))


@operator(_fake_backward)
def group_backward(
    upstream: Upstream, call: GroupForward, kept: Kept
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v, g, beta and the initial state; empty for an absent one.

    Of the initial state it reads only whether there is one.
    """
    (do, dht), (factors, Tm, h, vn, M, table) = upstream, kept
    q, k, v, g, beta, initial_state, scale, norm, _, _, segments, _ = call
    q, k, v, do, g = unit_stride(q), unit_stride(k), unit_stride(v), unit_stride(do), g.contiguous()
    dht = None if dht is None else dht.contiguous()
    plan = launch_plan(q, k, v, None, "auto", "decayed")
    config, chunks = plan.config, plan.chunks
    sizes = plan.sizes | {"C": config.C, "FULL": plan.full, "PRECISION": plan.precision}
    (B, T, HQ, K), (HV, V) = q.shape, v.shape[2:]
    groups = config.C // GROUP
    dh, dw = torch.empty_like(h), torch.empty_like(vn)
    dh0 = q.new_empty((B, HV, K, V) if initial_state is not None else (0,), dtype=torch.float32)
    strides = (*q.stride()[:3], *k.stride()[:3], *do.stride()[:3])
    R = None
    if HQ > HV:
        R = q.new_empty(chunks.count, groups, HV, V, K, dtype=torch.float32)
        launch(
            group_sums_kernel, chunks.count * groups * HV * cdiv(V, config.pair_BV),
            q, factors, do, R, T, B * T, *strides[:3], *strides[6:],
            **{name: size for name, size in sizes.items() if name != "H"}, BV=config.pair_BV,
            num_warps=config.pair_warps, num_stages=1,
        )  # fmt: skip
    BV, warps = slices(config.grad_BV, config.grad_warps, V, B * HV, multiprocessors(q.device))
    stages = config.grad_stages if R is None else summed_stages(config, plan.sizes["BK"], BV, k.element_size())
    programs, start = B * segments * HV * cdiv(V, BV), dht
    common = sizes | {"BV": BV, "SEGMENTS": segments, "STAGES": stages, "num_warps": warps}
    if segments > 1:
        start = q.new_empty(B, segments, HV, K, V, dtype=torch.float32)
        launch(
            group_states_backward_kernel, programs,
            q, k, factors, Tm, do, R, None, dh, dw, start, table, T, B * T, *strides, **common, FINAL=False,
            INITIAL=True, KEEP=False,
        )  # fmt: skip
        compose(M if M.numel() else None, start, dht, table, True, plan.precision)
    launch(
        group_states_backward_kernel, programs,
        q, k, factors, Tm, do, R, start, dh, dw, dh0, table, T, B * T, *strides, **common, FINAL=start is not None,
        INITIAL=initial_state is not None, KEEP=True,
    )  # fmt: skip
    dq, dk, dv, dbeta = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, beta))
    dg, none = torch.empty_like(g), q.new_empty(0, dtype=torch.float32)
    kernel = plan.serving(GRADIENTS, q, k, do)
    if kernel is HOPPER_GRADIENTS:
        launches.launch_gradients(
            q, k, v, factors, none, do, h, dh, vn, dw, g, None, None, dq, dk, dv, dg, dbeta, none,
            scale, norm, False, groups=True,
        )  # fmt: skip
        return dq, dk, dv, dg, dbeta, dh0
    E = torch.empty_like(Tm)
    if kernel is GRADIENTS_64:
        launch(
            joint_gradients_kernel, chunks.count * HV,
            q, k, v, factors, None, do, h, dh, vn, dw, torch.empty_like(E), E, g, None, None, dq, dk, dv, dg, dbeta,
            none, None, None, None, scale, T, B * T, *strides, *v.stride()[:3],
            FORM=plan.chunk_form(tile_width(V, v.dtype), NORM=norm, GROUPS=True),
            num_warps=4, num_stages=1, maxnreg=255,
        )  # fmt: skip
        return dq, dk, dv, dg, dbeta, dh0
    launch(
        query_gradients_kernel, chunks.count * HQ,
        q, k, factors, do, h, vn, dq, T, B * T, *strides, **sizes, NORM=norm, BV=config.input_BV,
        num_warps=config.input_warps, num_stages=1, maxnreg=config.input_registers,
    )  # fmt: skip
    dG = q.new_empty(HV, B * T, dtype=torch.float32)
    launch(
        pair_gradients_kernel, chunks.count * HV,
        k, v, factors, None, do, h, vn, dw, None, E, dG, dv, dbeta, None, None, None, scale, T, B * T,
        *strides[3:], *v.stride()[:3], FORM=plan.chunk_form(config.pair_BV, GROUPS=True),
        num_warps=config.pair_warps, num_stages=1, maxnreg=config.pair_registers,
    )  # fmt: skip
    launch(
        input_gradients_kernel, chunks.count * k.shape[2],
        q, k, factors, do, h, dh, vn, dw, R, E, dG, g, None, None, None, dk, dg, none, None, None, None, T, B * T,
        *strides, FORM=plan.chunk_form(config.input_BV, NORM=norm, GROUPS=True), num_warps=config.input_warps,
        num_stages=1, maxnreg=config.input_registers,
    )  # fmt: skip
    return dq, dk, dv, dg, dbeta, dh0


def summed_stages(config: ChunkConfig, BK: int, BV: int, element_size: int) -> int:
    """Pipeline stages of the backward state kernel where it reads the sums of query_sums.py, as that of chips.py."""
    stage = element_size * config.C * (BK + config.C) + 4 * BV * BK * (config.C // GROUP)
    return max(1, min(config.grad_stages, 200 * 1024 // stage))


_chunk = differentiable_call(group_forward, group_backward, DIFFERENTIATED, Upstream, Kept, without=["initial_state"])


def segments_for(programs: int, chunks_a_row: int, K: int, multiprocessors: int) -> int:
    """The number of segments per sequence, given that `programs` programs would process uncut sequences.

    Only segments that are composed: where little is forgotten, the others are processed one after the other. On an
    H200 an uncut chunk takes 1.6 us, so that from some 40 chunks on a cut saves more than its launches cost. Powers of
    two, since every number is compiled by itself.
    """
    if chunks_a_row < 40 or K > MAX_COMPOSED_KEY:
        return 1
    for segments in (32, 16, 8, 4):
        if segments * programs <= multiprocessors and 5 * segments <= chunks_a_row:
            return segments
    return 1


def chunk_group_triton(call: GroupRuleCall, segments: int | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`deltanet_kernels.chunk_group_gated_delta_rule` in Triton, for checked arguments.

    Precision as in `chunk_gated_delta_rule_triton`. Runs on the current stream, never waits for the device, and gives
    the same bits every time. The number of segments per sequence is chosen from the sizes by default.

    Raises:
        NotImplementedError: head sizes over 256, dtypes other than float32, bfloat16, float16; gradients of packed
            sequences, and in 16 bits where value heads share a key head.
    """
    q, k, v, rule = call.q, call.k, call.v, call.rule
    check_supported(q.dtype, q.shape[3], v.shape[3])
    dtype = v.dtype
    if min(q.shape[3], v.shape[3]) < MIN_HALF_SIZE:
        q, k, v = q.float(), k.float(), v.float()
    keep = rule.needs_gradients()
    if keep and call.cu_seqlens is not None:
        raise NotImplementedError("gradients of packed sequences")
    if keep and k.shape[2] < v.shape[2] and dtype != torch.float32:
        raise NotImplementedError(f"gradients in {dtype} of {k.shape[2]} key heads for {v.shape[2]} value heads")
    if segments is None:
        config, (B, T, HV, V), rows = pinned_config(k, v), v.shape, rule.dims.N
        programs = rows * HV * cdiv(V, min(config.state_BV, 64))
        segments = segments_for(programs, B * T // (rows * config.C), k.shape[3], multiprocessors(k.device))
    forward = GroupForward(
        q, k, v, call.g, call.beta, call.initial_state, rule.factor, call.use_qk_l2norm_in_kernel,
        call.output_final_state, keep, segments, call.cu_seqlens,
    )  # fmt: skip
    o, ht, *_ = (_chunk if keep else _without_gradients)(forward)
    return o.to(dtype), ht if call.output_final_state else None
