"""The rule with a decay per channel by its recurrence, for short inputs: one kernel, the state read and written once.

    S_t = Diag(e^{g_t}) S_{t-1} + beta_t k_t (v_t - p_t^T Diag(e^{g_t}) S_{t-1})^T        o_t = scale * q_t^T S_t

A program holds a [K, BV] slice of one head's state and processes its tokens in order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from deltanet_kernels.channel_gates.calls import ChannelCall
from deltanet_kernels.channel_gates.chunk import chunk_channel_gated_delta_rule_triton
from deltanet_kernels.channel_gates.config import check_supported
from deltanet_kernels.common.config import recurrent_config
from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import operator
from deltanet_kernels.common.sequences import locate_row
from deltanet_kernels.common.sizes import cdiv, power_of_two
from deltanet_kernels.common.tiles import L2_EPS


@triton.jit(do_not_specialize=["T"])
def _recurrent_kernel(
    q, k, p, v, g, beta, state, new_state, o, cu_seqlens, scale, T,
    q_row, q_token, q_head, k_row, k_token, k_head, p_row, p_token, p_head, v_row, v_token, v_head,
    H: tl.constexpr, HV: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, ERASE: tl.constexpr, OWN_KEY: tl.constexpr, NORM: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Process the tokens of a sequence in order; one program per (sequence, state head, slice of V)."""
    HO: tl.constexpr = HQ if HQ > HV else HV
    GROUP: tl.constexpr = HO // HV
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = pid % NV
    head = (pid // NV) % HV
    n = pid // (NV * HV)
    row, begin, flat, length = locate_row(n, cu_seqlens, T, VARLEN)
    d = tl.arange(0, BK)
    e = i_v * BV + tl.arange(0, BV)
    md = d < K
    me = e < V
    mS = md[:, None] & me[None, :]
    at = (n.to(tl.int64) * HV + head) * K * V + d[:, None] * V + e[None, :]
    S = tl.zeros([BK, BV], dtype=tl.float32)
    if INITIAL:
        S += tl.load(state + at, mask=mS, other=0.0).to(tl.float32)
    for t in range(0, length):
        token = begin + t
        k_from = k + row * k_row + token * k_token + (head // (HV // H)).to(tl.int64) * k_head
        k_d = tl.load(k_from + d, mask=md, other=0.0).to(tl.float32)
        v_from = v + row * v_row + token * v_token + head.to(tl.int64) * v_head
        v_e = tl.load(v_from + e, mask=me, other=0.0).to(tl.float32)
        if NORM:
            k_d = k_d * tl.rsqrt(tl.sum(k_d * k_d, axis=0) + L2_EPS)
        at_token = (flat + t) * HV + head
        decay = tl.exp(tl.load(g + at_token * K + d, mask=md, other=0.0).to(tl.float32))
        S = S * decay[:, None]
        if ERASE:
            p_d = k_d
            if OWN_KEY:
                p_from = p + row * p_row + token * p_token + head.to(tl.int64) * p_head
                p_d = tl.load(p_from + d, mask=md, other=0.0).to(tl.float32)
            v_e = v_e - tl.sum(p_d[:, None] * S, axis=0)
        S += k_d[:, None] * (tl.load(beta + at_token).to(tl.float32) * v_e)[None, :]
        for m in tl.static_range(GROUP):
            out = head * GROUP + m
            q_from = q + row * q_row + token * q_token + (out // (HO // HQ)).to(tl.int64) * q_head
            q_d = tl.load(q_from + d, mask=md, other=0.0).to(tl.float32)
            f = scale
            if NORM:
                f = scale * tl.rsqrt(tl.sum(q_d * q_d, axis=0) + L2_EPS)
            o_e = tl.sum(q_d[:, None] * S, axis=0) * f
            tl.store(o + ((flat + t) * HO + out) * V + e, o_e.to(o.dtype.element_ty), mask=me)
    if FINAL:
        tl.store(new_state + at, S, mask=mS)


def _results(call: ChannelCall, make: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    d, v = call.dims, call.v
    shape = (d.N, d.HV, d.K, d.V) if call.output_final_state else (0,)
    o = make(d.B, d.T, d.HO, d.V, dtype=v.dtype, device=v.device)
    return o, v.new_empty(shape, dtype=torch.float32)


def _fake_recurrent(call: ChannelCall):
    return _results(call, torch.empty)


@operator(_fake_recurrent)
def channel_recurrent(call: ChannelCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o and the final state (empty unless it is wanted)."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in call[:3])
    key = k if call.erase_key is None else call.erase_key.contiguous()
    _, T, H, HQ, HV, _, K, V, rows = call.dims
    cu_seqlens = None if call.cu_seqlens is None else call.cu_seqlens.contiguous()
    state = None if call.initial_state is None else call.initial_state.contiguous()
    o, new_state = _results(call, torch.empty if cu_seqlens is None else torch.zeros)
    BV, warps = recurrent_config(K, V, rows * HV)
    launch(
        _recurrent_kernel, rows * HV * cdiv(V, BV), q, k, key, v, call.g.contiguous(), call.beta.contiguous(), state,
        new_state, o, cu_seqlens, call.factor, T, *q.stride()[:3], *k.stride()[:3], *key.stride()[:3],
        *v.stride()[:3], H=H, HV=HV, HQ=HQ, K=K, V=V, BK=power_of_two(K, 1), BV=BV, ERASE=call.erase,
        OWN_KEY=call.erase_key is not None, NORM=call.use_qk_l2norm_in_kernel, INITIAL=state is not None,
        FINAL=call.output_final_state, VARLEN=cu_seqlens is not None, num_warps=warps,
    )  # fmt: skip
    return o, new_state


def fused_recurrent_channel_gated_delta_rule_triton(call: ChannelCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`deltanet_kernels.fused_recurrent_channel_gated_delta_rule` in Triton.

    Calls that need gradients use the chunk kernels.

    Raises:
        NotImplementedError: see `chunk_channel_gated_delta_rule_triton`.
    """
    check_supported(call.q.dtype, call.q.shape[3], call.v.shape[3])
    if call.needs_gradients():
        return chunk_channel_gated_delta_rule_triton(call)
    o, state = channel_recurrent(call)
    return o, state if call.output_final_state else None
