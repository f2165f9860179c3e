"""The Mesa layer on CUDA, in chunks: the launches, their registration with PyTorch, and the entry point.

H is the state of the gated delta rule without erasing, with the keys as values, so its kernels serve: row factors
(scores.py) and the states of the values [v, k], which have S and H side by side (states.py). conjugate_gradients.py
then finds x and the outputs. Backward, with y_t = (H_t + diag(Lambda))^{-1} dx_t from the same kernel, the gradients of
k, v, g, beta and the states are those of

    sum_t scale dO_t . S_t^T x_t - y_t . H_t x_t

so of the rule without erasing for the queries x, the values [v, k] and the output gradients [scale dO, -y].

All numbers are float32 and all products `PRECISION`, three products of 10 bits on tensor cores. Errors in H, x or dx
come back multiplied by up to the condition of H + diag(Lambda), and H grows along a component that the keys share. Of
512 unit keys with 90% of their power in common, without decay and with a ridge of 0.25, the outputs of 16 steps were
wrong by 2.4e-5 in IEEE float32, 2.3e-5 in tf32x3, 1.1% in tf32 and 9.7% with products of bfloat16 (relative, K = 64,
the roundings of the factors emulated on a CPU).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

import torch

from deltanet_kernels.arguments import Upstream
from deltanet_kernels.channel_gates.chunk import unit_rows
from deltanet_kernels.common.config import MAX_HEAD_SIZE, slices, tile_width
from deltanet_kernels.common.device import capability, multiprocessors
from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import differentiable_call, operator
from deltanet_kernels.common.rows import unit_stride
from deltanet_kernels.common.sequences import Chunks, cut_chunks
from deltanet_kernels.common.sizes import cdiv
from deltanet_kernels.gated_delta_rule.chips import ChunkConfig, chunk_config
from deltanet_kernels.gated_delta_rule.chunk_backward import chunk_backward
from deltanet_kernels.gated_delta_rule.chunk_forward import ChunkForward
from deltanet_kernels.gated_delta_rule.chunk_forward import Kept as KeptByRule
from deltanet_kernels.gated_delta_rule.launch_plan import ChunkForm
from deltanet_kernels.gated_delta_rule.row_factors import ChunkInputs
from deltanet_kernels.gated_delta_rule.scores import scores
from deltanet_kernels.gated_delta_rule.states import states_kernel
from deltanet_kernels.mesa.calls import MesaCall, MesaState
from deltanet_kernels.mesa.conjugate_gradients import conjugate_gradients_kernel

PRECISION = "tf32x3"
MAX_KEY_SIZE = 128  # H of 256 channels does not fit into the registers of a program


DIFFERENTIATED = ("q", "k", "v", "g", "beta", "ridge", "initial_state")
"""The fields of a call whose gradients `mesa_backward` returns, in its order."""


class MesaForward(NamedTuple):
    """The arguments of `mesa_forward`: those of a `MesaCall`, and how it is computed."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    ridge: torch.Tensor
    initial_state: torch.Tensor | None
    """The states [S, H^T], [N, HV, K, V + K]."""
    cu_seqlens: torch.Tensor | None
    scale: float
    steps: int
    final: bool
    """Compute the final state."""
    keep: bool
    """Return what the backward pass reads."""


class Kept(NamedTuple):
    """The results of `mesa_forward` after the output and the final state, which the backward pass reads; float32."""

    x: torch.Tensor
    """[B, T, HO, K]."""
    factors: torch.Tensor
    """Row factors [6 HV + 4 HO, B*T]."""
    P: torch.Tensor
    """Scores of x [chunks, HO, C, C]."""
    states: torch.Tensor
    """The states that enter each chunk, S^T and H [chunks, HV, V + K, K]."""


def _config(k: torch.Tensor, v: torch.Tensor) -> ChunkConfig:
    K = k.shape[3]
    return chunk_config(K, v.shape[3] + K, torch.float32, capability(k.device))


def _joined(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[v, k] per state, float32 [B, T, HV, V + K]."""
    shared = v.shape[2] // k.shape[2]
    return torch.cat([v.float(), k.repeat_interleave(shared, 2) if shared > 1 else k], dim=-1)


def _solve(
    right: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ridge: torch.Tensor, kept: Kept, o: torch.Tensor,
    chunks: Chunks, scale: float, steps: int, forward: bool,
) -> None:  # fmt: skip
    """Launch `conjugate_gradients_kernel`: forward it writes the x, P and o that are given, backward the x."""
    (B, T, H, K), (HV, V), HO = k.shape, v.shape[2:], kept.x.shape[2]
    BK, BV = (tile_width(size, torch.float32) for size in (K, V))
    full = not chunks.varlen and T % chunks.size == 0 and (BK, BV) == (K, V)
    if chunks.count:
        launch(
            conjugate_gradients_kernel, chunks.count * HO,
            right, k, v, ridge, kept.factors, kept.states, kept.x, kept.P, o, chunks.cu_seqlens, chunks.row_of_chunk,
            chunks.first_chunk, scale, T, B * T, steps, *right.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            H=H, HV=HV, HR=right.shape[2], HO=HO, K=K, V=V, BK=BK, BV=BV, C=chunks.size, VARLEN=chunks.varlen,
            FULL=full, FORWARD=forward, PRECISION=PRECISION, num_warps=8 if BK > 64 else 4, num_stages=1,
        )  # fmt: skip


def _fake_forward(call: MesaForward):
    k, v, cu_seqlens, final, keep = call.k, call.v, call.cu_seqlens, call.final, call.keep
    (B, T, HQ, K), HV, V = call.q.shape, v.shape[2], v.shape[3]
    C, HO, W = _config(k, v).C, max(HQ, HV), V + K
    rows = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    n = B * ((T + C - 1) // C) if cu_seqlens is None else (T + C - 1) // C + rows
    sizes = ((B, T, HO, K), (6 * HV + 4 * HO, B * T), (n, HO, C, C), (n, HV, W, K))
    return (
        v.new_empty(B, T, HO, V),
        k.new_empty((rows, HV, K, W) if final else (0,)),
        *(k.new_empty(size if keep else (0,)) for size in sizes),
    )


@operator(_fake_forward)
def mesa_forward(
    call: MesaForward,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """o, the final states [N, HV, K, V + K] (empty unless `final`), and the fields of `Kept` (empty unless `keep`).

    q and k are float32.
    """
    q, k, v, g, beta, ridge, start, cu_seqlens, scale, steps, final, keep = call
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    g, beta, ridge = g.contiguous(), beta.contiguous(), ridge.contiguous()
    start = None if start is None else start.contiguous()
    (B, T, HQ, K), H, HV, V = q.shape, k.shape[2], v.shape[2], v.shape[3]
    config, HO, W = _config(k, v), max(HQ, HV), V + K
    chunks = cut_chunks(B, T, config.C, cu_seqlens)
    BK, both = tile_width(K, torch.float32), _joined(k, v)
    full = not chunks.varlen and T % chunks.size == 0 and (BK, tile_width(W, torch.float32)) == (K, W)
    none = k.new_empty(0)
    # Of q's scores only the row factors are used, so their precision does not matter; x has its own.
    P, _, factors, _ = scores(
        ChunkInputs(q, k, g, beta, None, None, chunks, 1.0, False, False, False, "off"), full, "tf32",
        config.score_warps,
    )  # fmt: skip
    states, written = k.new_empty(chunks.count, HV, W, K), torch.empty_like(both)
    ht = k.new_empty((chunks.rows, HV, K, W) if final else (0,))
    BV, warps = slices(config.state_BV, config.state_warps, W, chunks.rows * HV, multiprocessors(k.device))
    launch(
        states_kernel, chunks.rows * HV * cdiv(W, BV),
        q, k, both, factors, none, P, start, none, states, written, ht, none, None, chunks.cu_seqlens,
        chunks.first_chunk, T, B * T, *q.stride()[:3], *k.stride()[:3], *both.stride()[:3], INITIAL=start is not None,
        FINAL=final, OUTPUT=False, KEEP=True, TRANSITION=False, SEGMENTS=1, COMPOSED=False, STAGES=config.state_stages,
        FORM=ChunkForm(
            H=H, HV=HV, HQ=HQ, K=K, V=W, BK=BK, BV=BV, C=chunks.size, VARLEN=chunks.varlen, FULL=full, READ=False,
            UNDECAYED=False, PRECISION=PRECISION,
        ),
        num_warps=warps,
    )  # fmt: skip
    new = torch.empty if cu_seqlens is None else torch.zeros  # tokens after the last packed sequence get zeros
    o, x = new(B, T, HO, V, dtype=v.dtype, device=v.device), new(B, T, HO, K, dtype=k.dtype, device=k.device)
    _solve(q, k, v, ridge, Kept(x, factors, P, states), o, chunks, scale, steps, True)
    if not keep:
        x, factors, P, states = (k.new_empty(0) for _ in range(4))
    return o, ht, x, factors, P, states


def _fake_backward(upstream: Upstream, call: MesaForward, kept: Kept):
    k, v, cu_seqlens = call.k, call.v, call.cu_seqlens
    rows = call.q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    K, HV, V = k.shape[3], v.shape[2], v.shape[3]
    grads = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in call[:6])
    return (*grads, k.new_empty((0,) if call.initial_state is None else (rows, HV, K, V + K)))


@operator(_fake_backward)
def mesa_backward(
    upstream: Upstream, call: MesaForward, kept: Kept
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:  # fmt: skip
    """Gradients of q, k, v, g, beta, the ridge and the initial states (empty for absent ones).

    Of the initial states it reads only whether there are any.
    """
    (do, dht), (x, factors, P, states) = upstream, kept
    q, k, v, g, beta, ridge, initial_state, cu_seqlens, scale, steps, *_ = call
    do, k, v, ridge = unit_stride(do), unit_stride(k), unit_stride(v), ridge.contiguous()
    (B, T, H, K), HQ, (HV, V), HO = k.shape, q.shape[2], v.shape[2:], x.shape[2]
    chunks = cut_chunks(B, T, _config(k, v).C, cu_seqlens)
    y = (torch.empty_like if cu_seqlens is None else torch.zeros_like)(x)
    _solve(do, k, v, ridge, Kept(y, factors, P, states), y, chunks, scale, steps, False)
    none, both = k.new_empty(0), _joined(k, v)
    written = beta.float().unsqueeze(-1) * both  # the V' of a rule without erasing
    _, dk, dboth, dg, dbeta, dh0, *_ = chunk_backward(
        Upstream(torch.cat([scale * do.float(), -y], dim=-1), dht),
        ChunkForward(
            x, k, both, g, beta, initial_state, cu_seqlens, None, None, 1.0, False, False, False, True,
            PRECISION, 1, "off",
        ),
        KeptByRule(factors, none, P, states, written, none, none),
    )  # fmt: skip
    dv, dkeys = dboth.split([V, K], dim=-1)
    dk += dkeys.unflatten(2, (H, -1)).sum(3)
    dq = y if HQ == HO else y.unflatten(2, (HQ, -1)).sum(3)
    dridge = -(x * y).unflatten(2, (HV, -1)).sum((0, 1, 3))
    return dq, dk, dv.to(v.dtype).contiguous(), dg, dbeta, dridge.to(ridge.dtype), dh0


_mesa = differentiable_call(mesa_forward, mesa_backward, DIFFERENTIATED, Upstream, Kept, without=["initial_state"])


def chunk_mesa_triton(call: MesaCall) -> tuple[torch.Tensor, MesaState | None]:
    """`deltanet_kernels.chunk_mesa` in Triton, for checked arguments.

    Runs on the current stream, never waits for the device, and gives the same bits every time.

    Raises:
        NotImplementedError: keys over 128 channels, keys and values together over 256, or dtypes other than float32,
            bfloat16, float16.
    """
    rule, q, k = call.rule, call.q, call.k
    d = rule.dims
    if d.K > MAX_KEY_SIZE or d.K + d.V > MAX_HEAD_SIZE:
        raise NotImplementedError(
            f"head sizes {d.K} and {d.V}: the kernels go up to {MAX_KEY_SIZE} for keys and {MAX_HEAD_SIZE} for both"
        )
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotImplementedError(f"dtype {q.dtype}: the kernels take float32, bfloat16 and float16")
    q, k = q.float(), k.float()
    if call.use_qk_l2norm_in_kernel:
        q, k = unit_rows(q), unit_rows(k)
    before = call.first_state()
    inputs = (q, k, call.v, call.g, call.beta, call.ridge, *before)
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    # The kernels multiply by the rows of H, the recurrence by its columns: the same, except in the gradient of H.
    state = torch.cat([before.values, before.keys.mT], dim=-1)
    forward = MesaForward(
        *inputs[:6], state, call.cu_seqlens, rule.factor, call.steps, call.output_final_state, keep
    )  # fmt: skip
    o, final, *_ = _mesa(forward)
    if not call.output_final_state:
        return o, None
    S, H = final.split([d.V, d.K], dim=-1)
    return o, MesaState(S.contiguous(), H.mT.contiguous())
