"""Gated delta rule by its recurrence, for short inputs: one kernel that reads and writes the state once.

    S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - k_t^T R_t)^T        o_t = scale * q_t^T S_t

with R_t = e^{g_t} S_{t-1}, or what `erase` says (reference.py). A program holds a [K, BV]
slice of one head's state and processes its tokens in order. The kernel also computes the gates, the sigmoid and the L2
norm.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from deltanet_kernels.arguments import Erase, RuleCall
from deltanet_kernels.common.config import check_supported, recurrent_config
from deltanet_kernels.common.launch import launch
from deltanet_kernels.common.registration import operator
from deltanet_kernels.common.sequences import locate_row
from deltanet_kernels.common.sizes import cdiv, power_of_two
from deltanet_kernels.common.tiles import L2_EPS, softplus
from deltanet_kernels.gated_delta_rule.chunk import chunk_gated_delta_rule_triton


@triton.jit(do_not_specialize=["T"])
def _recurrent_kernel(
    q, k, v, g, beta, A_log, dt_bias, state, new_state, o, cu_seqlens, scale, T,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    H: tl.constexpr, HV: tl.constexpr, HQ: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr, SIGMOID: tl.constexpr, NORM: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, VARLEN: tl.constexpr, READ: tl.constexpr, UNDECAYED: tl.constexpr,
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
        k_d = tl.load(
            k + row * k_row + token * k_token + (head // (HV // H)).to(tl.int64) * k_head + d, mask=md, other=0.0
        )
        v_e = tl.load(v + row * v_row + token * v_token + head.to(tl.int64) * v_head + e, mask=me, other=0.0).to(
            tl.float32
        )
        k_d = k_d.to(tl.float32)
        x = tl.load(g + (flat + t) * HV + head).to(tl.float32)
        b = tl.load(beta + (flat + t) * HV + head).to(tl.float32)
        if GATE:
            x = -tl.exp(tl.load(A_log + head).to(tl.float32)) * softplus(x + tl.load(dt_bias + head).to(tl.float32))
        if SIGMOID:
            b = 1.0 / (1.0 + tl.exp(-b))
        if NORM:
            k_d = k_d * tl.rsqrt(tl.sum(k_d * k_d, axis=0) + L2_EPS)
        gamma = tl.exp(x)
        if UNDECAYED:
            delta = b * (v_e - tl.sum(k_d[:, None] * S, axis=0))
        elif READ:
            delta = b * (v_e - gamma * tl.sum(k_d[:, None] * S, axis=0))
        else:
            delta = b * v_e
        for m in tl.static_range(GROUP):
            out = head * GROUP + m
            q_d = tl.load(
                q + row * q_row + token * q_token + (out // (HO // HQ)).to(tl.int64) * q_head + d, mask=md, other=0.0
            )
            q_d = q_d.to(tl.float32)
            f = scale
            if NORM:
                f = scale * tl.rsqrt(tl.sum(q_d * q_d, axis=0) + L2_EPS)
            # q^T S_t = gamma q^T S_{t-1} + (q^T k) delta: both sums over S wait for nothing but S.
            o_e = gamma * tl.sum(q_d[:, None] * S, axis=0) + tl.sum(q_d * k_d, axis=0) * delta
            tl.store(o + ((flat + t) * HO + out) * V + e, (o_e * f).to(o.dtype.element_ty), mask=me)
        S = S * gamma + k_d[:, None] * delta[None, :]
    if FINAL:
        tl.store(new_state + at, S.to(new_state.dtype.element_ty), mask=mS)


def _launch(call: RuleCall, state: torch.Tensor | None, new_state: torch.Tensor | None) -> torch.Tensor:
    """o, with the state before the first token and the one to write, both contiguous."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in call[:3])
    B, T, H, HQ, HV, HO, K, V, rows = call.dims
    A_log, dt_bias = (call.A_log, call.dt_bias) if call.use_gate_in_kernel else (None, None)
    cu_seqlens = None if call.cu_seqlens is None else call.cu_seqlens.contiguous()
    varlen = cu_seqlens is not None
    o = (torch.zeros if varlen else torch.empty)(B, T, HO, V, dtype=v.dtype, device=v.device)
    BV, warps = recurrent_config(K, V, rows * HV)
    launch(
        _recurrent_kernel, rows * HV * cdiv(V, BV),
        q, k, v, call.g.contiguous(), call.beta.contiguous(), A_log, dt_bias, state, new_state, o, cu_seqlens,
        call.factor, T, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], H=H, HV=HV, HQ=HQ, K=K, V=V,
        BK=power_of_two(K, 1), BV=BV, GATE=A_log is not None, SIGMOID=call.use_beta_sigmoid_in_kernel,
        NORM=call.use_qk_l2norm_in_kernel, INITIAL=state is not None, FINAL=new_state is not None, VARLEN=varlen,
        READ=call.erase != "off", UNDECAYED=call.erase == "undecayed", num_warps=warps,
    )  # fmt: skip
    return o


def _final_state(call: RuleCall) -> torch.Tensor:
    d = call.dims
    shape = (d.N, d.HV, d.K, d.V) if call.output_final_state else (0,)
    return call.q.new_empty(shape, dtype=torch.float32)


def _fake_update_(call: RuleCall):
    d = call.dims
    return call.v.new_empty(d.B, d.T, d.HO, d.V)


def _fake_recurrent(call: RuleCall):
    return _fake_update_(call), _final_state(call)


@operator(_fake_recurrent)
def recurrent(call: RuleCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o and the final state (empty unless it is wanted)."""
    state = None if call.initial_state is None else call.initial_state.contiguous()
    final = _final_state(call)
    return _launch(call, state, final if call.output_final_state else None), final


@operator(_fake_update_, mutates=("initial_state",))
def recurrent_update_(call: RuleCall) -> torch.Tensor:
    """Return o and update the contiguous float32 or bfloat16 initial state [N, HV, K, V] in place."""
    return _launch(call, call.initial_state, call.initial_state)


def fused_recurrent_gated_delta_rule_triton(call: RuleCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`deltanet_kernels.fused_recurrent_gated_delta_rule` in Triton; calls that need gradients use the chunk kernels.

    Raises:
        NotImplementedError: head sizes over 256, or dtypes other than float32, bfloat16, float16.
    """
    check_supported(call.q.dtype, call.q.shape[3], call.v.shape[3])
    if call.needs_gradients():
        return chunk_gated_delta_rule_triton(call)
    o, state = recurrent(call)
    return o, state if call.output_final_state else None


def gated_delta_rule_step_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    erase: Erase = "decayed",
) -> torch.Tensor:
    """One or several decoding steps with the state in place; returns o [B, T, max(HQ, HV), V].

    Args:
        state: [N, HV, K, V] float32 or bfloat16, contiguous; holds the state after the last token on return.
        A_log, dt_bias: [HV]; given, g is the raw gate logit. The rest as `chunk_gated_delta_rule`, no gradients.

    Raises:
        ValueError: a state that is not contiguous.
    """
    if not state.is_contiguous():
        raise ValueError(f"state: got strides {state.stride()}, needs a contiguous [N, HV, K, V] tensor")
    return recurrent_update_(
        RuleCall(
            q, k, v, g, beta, scale, state, False, use_qk_l2norm_in_kernel, cu_seqlens, A_log, dt_bias,
            A_log is not None, use_beta_sigmoid_in_kernel, erase,
        )
    )  # fmt: skip
