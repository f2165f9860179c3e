"""The rule with a decay per channel on CUDA, in chunks: the launches, their registration, and the entry point.

Forward: scores.py, solve.py of the gated delta rule, states.py, outputs.py. Backward: states_backward.py,
gradients_pairs.py, gradients_inputs.py. The package docstring defines the symbols; `Kept` lists what the forward pass
keeps for the backward pass.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

import torch

from deltanet_kernels.arguments import GatedNormCall, Upstream
from deltanet_kernels.channel_gates.calls import ChannelCall
from deltanet_kernels.channel_gates.config import ChannelConfig, channel_config, check_supported
from deltanet_kernels.channel_gates.gradients_inputs import InputsForm, input_gradients_kernel
from deltanet_kernels.channel_gates.gradients_pairs import pair_gradients_kernel
from deltanet_kernels.channel_gates.outputs import outputs_kernel
from deltanet_kernels.channel_gates.scores import scores_kernel
from deltanet_kernels.channel_gates.states import states_kernel
from deltanet_kernels.channel_gates.states_backward import states_backward_kernel
from deltanet_kernels.common.config import MIN_HALF_SIZE, product_precision
from deltanet_kernels.common.device import capability
from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import differentiable_call, operator
from deltanet_kernels.common.rows import unit_stride
from deltanet_kernels.common.sequences import cut_chunks
from deltanet_kernels.gated_delta_rule.launch_plan import kept_dtype
from deltanet_kernels.gated_delta_rule.solve import invert
from deltanet_kernels.norm import gated_rms_norm_triton

UNIT_EPS = 1e-6  # beside the squared length of q and k


DIFFERENTIATED = ("q", "k", "v", "g", "beta", "p", "initial_state")
"""The fields of a call whose gradients `channel_chunk_backward` returns, in its order."""


class ChannelForward(NamedTuple):
    """The arguments of `channel_chunk_forward`: those of a `ChannelCall`, and how it is computed."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    p: torch.Tensor | None
    """The erase key; None for k."""
    initial_state: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    scale: float
    erase: bool
    final: bool
    """Compute the final state."""
    keep: bool
    """Return what the backward pass reads."""
    precision: str


class Kept(NamedTuple):
    """The results of `channel_chunk_forward` after the output and the final state, which the backward pass reads."""

    reads: torch.Tensor
    """[chunks, HO, C, KP], dtype of the keys, as the tensors below unless said otherwise."""
    erases: torch.Tensor
    """[chunks, HV, C, KP]; empty without erasing."""
    writes: torch.Tensor
    """[chunks, HV, C, KP]."""
    fade: torch.Tensor
    """[chunks, HV, KP] float32."""
    P: torch.Tensor
    """Scores [chunks, HO, C, C]."""
    T: torch.Tensor
    """(I + L)^-1 [chunks, HV, C, C]; empty without erasing."""
    S: torch.Tensor
    """State entering each chunk, transposed [chunks, HV, VP, KP]; float32 unless the keys are bfloat16."""
    values: torch.Tensor
    """V' [chunks, HV, C, VP]; float32 unless the keys are bfloat16."""


def _config(k: torch.Tensor, v: torch.Tensor) -> ChannelConfig:
    return channel_config(k.shape[3], v.shape[3], k.dtype, capability(k.device))


def _fake_forward(call: ChannelForward):
    q, k, v, _, _, _, _, cu_seqlens, _, erase, final, keep, _ = call
    (B, T, HQ, K), HV, V = q.shape, v.shape[2], v.shape[3]
    config, HO = _config(k, v), max(HQ, HV)
    C, KP, VP = config.C, config.KP, config.VP
    rows = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    n = B * ((T + C - 1) // C) if cu_seqlens is None else (T + C - 1) // C + rows
    kept = kept_dtype(k.dtype)
    own = keep and erase
    return (
        q.new_empty(B, T, HO, V),
        q.new_empty((rows, HV, K, V) if final else (0,), dtype=torch.float32),
        k.new_empty((n, HO, C, KP) if keep else (0,)),
        k.new_empty((n, HV, C, KP) if own else (0,)),
        k.new_empty((n, HV, C, KP) if keep else (0,)),
        k.new_empty((n, HV, KP) if keep else (0,), dtype=torch.float32),
        k.new_empty((n, HO, C, C) if keep else (0,)),
        k.new_empty((n, HV, C, C) if own else (0,)),
        k.new_empty((n, HV, VP, KP) if keep else (0,), dtype=kept),
        k.new_empty((n, HV, C, VP) if keep else (0,), dtype=kept),
    )


@operator(_fake_forward)
def channel_chunk_forward(
    call: ChannelForward,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
    torch.Tensor, torch.Tensor,
]:  # fmt: skip
    """o, the final state (empty unless `final`), and the fields of `Kept` (empty unless `keep`)."""
    q, k, v, g, beta, p, initial_state, cu_seqlens, scale, erase, final, keep, precision = call
    precision = product_precision(precision, q.dtype)
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    p = k if p is None else unit_stride(p)
    g, beta = g.contiguous(), beta.contiguous()
    (B, T, HQ, K), H, HV, V, HO = q.shape, k.shape[2], v.shape[2], v.shape[3], max(q.shape[2], v.shape[2])
    config = _config(k, v)
    C, KP, VP = config.C, config.KP, config.VP
    chunks = cut_chunks(B, T, C, cu_seqlens)
    n, kept = chunks.count, kept_dtype(k.dtype)
    reads, P = k.new_empty(n, HO, C, KP), k.new_empty(n, HO, C, C)
    writes, fade = k.new_empty(n, HV, C, KP), k.new_empty(n, HV, KP, dtype=torch.float32)
    erases = k.new_empty((n, HV, C, KP) if erase else (0,))
    L = k.new_empty((n, HV, C, C) if erase else (0,), dtype=torch.float32)
    chunk_of = (chunks.cu_seqlens, chunks.row_of_chunk, chunks.first_chunk)
    flags = {"C": C, "VARLEN": chunks.varlen, "PRECISION": precision}
    if n:
        launch(
            scores_kernel, n * HO, q, k, p, g, beta, P, L, reads, erases, writes, fade, *chunk_of, scale, T,
            *q.stride()[:3], *k.stride()[:3], *p.stride()[:3], HQ=HQ, H=H, HP=p.shape[2], HV=HV, K=K, KP=KP,
            BK=config.score_BK, ERASE=erase, LIMIT=config.limit, **flags, num_warps=config.score_warps, num_stages=1,
            maxnreg=config.score_registers,
        )  # fmt: skip
    Tm = invert(L, k.dtype, T, chunks, precision, 1) if erase else k.new_empty(0)
    del L
    h, vn = k.new_empty(n, HV, VP, KP, dtype=kept), k.new_empty(n, HV, C, VP, dtype=kept)
    ht = q.new_empty((chunks.rows, HV, K, V) if final else (0,), dtype=torch.float32)
    state = None if initial_state is None else initial_state.contiguous()
    launch(
        states_kernel, chunks.rows * HV * (VP // config.BV), v, beta, erases, writes, Tm, fade, state, h, vn, ht,
        chunks.cu_seqlens, chunks.first_chunk, T, *v.stride()[:3], HV=HV, K=K, V=V, KP=KP, VP=VP, BV=config.BV,
        ERASE=erase, INITIAL=state is not None, FINAL=final, STAGES=config.stages, **flags, num_warps=4,
    )  # fmt: skip
    o = (torch.empty if cu_seqlens is None else torch.zeros)(B, T, HO, V, dtype=q.dtype, device=q.device)
    if n:
        launch(
            outputs_kernel, n * HO * (VP // config.BV), reads, P, h, vn, o, *chunk_of, T, HO=HO, HV=HV, V=V, KP=KP,
            VP=VP, BV=config.BV, **flags, num_warps=4, num_stages=1,
        )  # fmt: skip
    none = k.new_empty(0)
    if not keep:
        wide = none.new_empty(0, dtype=kept)
        return o, ht, none, k.new_empty(0), k.new_empty(0), fade.new_empty(0), k.new_empty(0), k.new_empty(0), wide, \
            wide.new_empty(0)  # fmt: skip
    return o, ht, reads, erases, writes, fade, P, Tm, h, vn


def _fake_backward(upstream: Upstream, call: ChannelForward, kept: Kept):
    q, k, v, g, beta, p, initial_state, cu_seqlens, *_ = call
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dp = k.new_empty((0,) if p is None else p.shape)
    state = (0,) if initial_state is None else (rows, v.shape[2], k.shape[3], v.shape[3])
    grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta))
    return (*grads, dp, q.new_empty(state, dtype=torch.float32))


@operator(_fake_backward)
def channel_chunk_backward(
    upstream: Upstream, call: ChannelForward, kept: Kept
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
]:  # fmt: skip
    """Gradients of q, k, v, g, beta, the erase key (empty if it is k) and the initial state (empty for an absent one).

    Of the initial state it reads only whether there is one.
    """
    (do, dht), (reads, erases, writes, fade, P, Tm, h, vn) = upstream, kept
    q, k, v, g, beta, p, initial_state, cu_seqlens, scale, erase, _, _, precision = call
    initial = initial_state is not None
    precision = product_precision(precision, q.dtype)
    q, k, v, do = unit_stride(q), unit_stride(k), unit_stride(v), unit_stride(do)
    g, beta = g.contiguous(), beta.contiguous()
    key = k if p is None else unit_stride(p)
    (B, T, HQ, K), H, HV, V, HO = q.shape, k.shape[2], v.shape[2], v.shape[3], max(q.shape[2], v.shape[2])
    config = _config(k, v)
    C, KP, VP = config.C, config.KP, config.VP
    chunks = cut_chunks(B, T, C, cu_seqlens)
    flags = {"C": C, "ERASE": erase, "VARLEN": chunks.varlen, "PRECISION": precision}
    chunk_of = (chunks.cu_seqlens, chunks.row_of_chunk, chunks.first_chunk)
    dh, dw = torch.empty_like(h), torch.empty_like(vn)
    dh0 = q.new_empty((chunks.rows, HV, K, V) if initial else (0,), dtype=torch.float32)
    dht = None if dht is None else dht.contiguous()
    launch(
        states_backward_kernel, chunks.rows * HV * (VP // config.BV),
        do, reads, erases, writes, Tm, P, fade, dht, dh, dw, dh0, chunks.cu_seqlens, chunks.first_chunk, T,
        *do.stride()[:3], HO=HO, HV=HV, K=K, V=V, KP=KP, VP=VP, BV=config.BV, INITIAL=initial, FINAL=dht is not None,
        STAGES=max(1, config.grad_stages - HO // HV + 1), **flags, num_warps=4,
    )  # fmt: skip
    # Tokens after the last packed sequence get zeros; heads that share a query or key are added in float32.
    new = torch.empty if cu_seqlens is None else torch.zeros
    dq = new(B, T, HO, K, dtype=q.dtype if HO == HQ else torch.float32, device=q.device)
    dk = new(B, T, HV, K, dtype=k.dtype if HV == H else torch.float32, device=q.device)
    dp = new((0,) if p is None else p.shape, dtype=k.dtype, device=q.device)
    dv, dg = new(v.shape, dtype=v.dtype, device=q.device), new(g.shape, dtype=g.dtype, device=q.device)
    slices = KP // config.grad_BK
    parts = q.new_zeros(1 + slices if erase else 1, B, T, HV, dtype=torch.float32)  # of dbeta
    if chunks.count:
        dP, dL = torch.empty_like(P), torch.empty_like(Tm)
        launch(
            pair_gradients_kernel, chunks.count * HV, v, beta, do, vn, dw, dP, dL, dv, parts, *chunk_of, T,
            *v.stride()[:3], *do.stride()[:3], HO=HO, HV=HV, V=V, VP=VP, BV=config.BV, **flags, num_warps=4,
            num_stages=1,
        )  # fmt: skip
        launch(
            input_gradients_kernel, chunks.count * HV * slices, q, k, key, g, beta, do, reads, erases, writes, fade, h,
            dh, vn, dw, dP, dL, dq, dk, dp, dg, parts, *chunk_of, scale, T, B * T,
            *q.stride()[:3], *k.stride()[:3], *key.stride()[:3], *do.stride()[:3],
            FORM=InputsForm(
                HQ=HQ, H=H, HP=key.shape[2], HV=HV, K=K, V=V, KP=KP, VP=VP, BK=config.grad_BK, BV=config.BV, C=C,
                ERASE=erase, OWN_KEY=p is not None, VARLEN=chunks.varlen, LIMIT=config.limit, PRECISION=precision,
            ),
            num_warps=config.grad_warps, num_stages=1,
        )  # fmt: skip
    dbeta = parts.sum(0).to(beta.dtype)
    if HO != HQ:
        dq = dq.unflatten(2, (HQ, -1)).sum(3).to(q.dtype)
    if HV != H:
        dk = dk.unflatten(2, (H, -1)).sum(3).to(k.dtype)
    return dq, dk, dv, dg, dbeta, dp, dh0


_chunk = differentiable_call(
    channel_chunk_forward, channel_chunk_backward, DIFFERENTIATED, Upstream, Kept, without=["initial_state"]
)


def unit_rows(x: torch.Tensor) -> torch.Tensor:
    """x * rsqrt(sum x^2 + 1e-6) over the last dimension, as RMSNorm with an equal weight."""
    size = x.shape[-1]
    weight = x.new_full((size,), size**-0.5, dtype=torch.float32)
    return gated_rms_norm_triton(GatedNormCall(x, None, weight, UNIT_EPS / size))


def chunk_channel_gated_delta_rule_triton(call: ChannelCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`deltanet_kernels.chunk_channel_gated_delta_rule` in Triton, for checked arguments.

    Float32 inputs are multiplied as `torch.set_float32_matmul_precision` says ("highest": IEEE float32). Runs on the
    current stream, never waits for the device, and gives the same bits every time.

    Raises:
        NotImplementedError: keys over 128 or values over 256 channels, or dtypes other than float32, bfloat16, float16.
    """
    q, k, v, erase_key = call.q, call.k, call.v, call.erase_key
    check_supported(q.dtype, q.shape[3], v.shape[3])
    if min(q.shape[3], v.shape[3]) < MIN_HALF_SIZE:
        q, k, v = q.float(), k.float(), v.float()
        erase_key = None if erase_key is None else erase_key.float()
    if call.use_qk_l2norm_in_kernel:
        q, k = unit_rows(q), unit_rows(k)
    forward = ChannelForward(
        q,
        k,
        v,
        call.g,
        call.beta,
        erase_key,
        call.initial_state,
        call.cu_seqlens,
        call.factor,
        call.erase,
        call.output_final_state,
        call.needs_gradients(),
        "auto",
    )
    o, ht, *_ = _chunk(forward)
    return o.to(call.v.dtype), ht if call.output_final_state else None
