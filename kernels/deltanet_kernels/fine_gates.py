"""Decays per key channel and per value channel, and write strengths per value channel, for the recurrence.

    S_t = R_t + k_t (beta_t * (v_t - k_t^T R_t))^T        R_t = Diag(e^{gk_t}) e^{g_t} S_{t-1} Diag(e^{gv_t})

Decays per key channel are the rule of `deltanet_kernels.channel_gates`. The columns of S do not see each other, so
with gates per value channel each column is a head of its own, with values of size 1; the heads share q and k.
"""

from __future__ import annotations

import torch

from deltanet_kernels import checks
from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.channel_gates.calls import ChannelCall
from deltanet_kernels.gated_delta_rule.drop_in import Result, in_layout, plain
from deltanet_kernels.gated_delta_rule.reference import log_decay_and_strength
from deltanet_kernels.operators import fused_recurrent_channel_gated_delta_rule, recurrent_rule


def present(v: torch.Tensor, gate: torch.Tensor | None, fill: float) -> torch.Tensor:
    """The gate itself, or `fill` for every token and head of v [B, T, HV, V]."""
    if gate is None:
        checks.require_tensor("v", v)
        return torch.full(v.shape[:3], fill, device=v.device)
    return gate


def recurrent_with_fine_gates(call: RuleCall, gk: torch.Tensor | None, gv: torch.Tensor | None) -> Result:
    """`fused_recurrent_gated_delta_rule` with gk [B, T, HV, K], gv [B, T, HV, V] or a strength [B, T, HV, V].

    Raises:
        ValueError: what `check_delta_rule` finds, gates of another shape, gk with another form of the erase term than
            "decayed" and "off", or gates per value channel with more query heads than value heads.
        TypeError: dtypes that do not fit.
    """
    per_value = isinstance(call.beta, torch.Tensor) and call.beta.dim() == 4
    checks.check_delta_rule(call._replace(beta=call.beta[..., 0]) if per_value else call, drop_in=True)
    dims, out_dtype, v_first = call.dims, call.v.dtype, call.state_v_first
    tokens, values = (dims.B, dims.T, dims.HV), "[B, T, HV, V], the shape of v"
    for name, gate, shape, meaning in (
        ("beta", call.beta if per_value else None, (*tokens, dims.V), f"[B, T, HV] or {values}"),
        ("gk", gk, (*tokens, dims.K), "[B, T, HV, K] with HV of v and K of k"),
        ("gv", gv, (*tokens, dims.V), values),
    ):
        if gate is not None:
            checks.require_shape(name, checks.require_input(name, gate, "q", call.q), shape, meaning)
            if name != "beta":
                checks.require_log_decay(name, gate)
    if gk is not None and call.erase == "undecayed":
        raise ValueError("gk: got a tensor, needs None with erase='undecayed'")
    by_column = per_value or gv is not None
    if by_column and dims.HQ > dims.HV:
        raise ValueError(f"q: got {dims.HQ} heads, needs at most the {dims.HV} of v with gates per value channel")

    call = plain(call)
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    g, beta = log_decay_and_strength(
        call.g, call.beta, call.A_log, call.dt_bias, call.use_beta_sigmoid_in_kernel, dtype
    )  # fmt: skip
    call = call._replace(
        g=g, beta=beta, A_log=None, dt_bias=None, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False
    )
    if by_column:
        call = _columns_as_heads(call, gv)
        gk = None if gk is None else gk.repeat_interleave(dims.V, dim=2)
    o, state = _run(call, gk)
    if by_column:
        o = o.reshape(*tokens, dims.V)
        state = None if state is None else state.reshape(dims.N, dims.HV, dims.V, dims.K).transpose(2, 3)
    state = state if state is None or v_first else state.contiguous()
    return o.to(out_dtype), in_layout(state, v_first)


def _columns_as_heads(call: RuleCall, gv: torch.Tensor | None) -> RuleCall:
    """The same rule with V times as many heads of one value each; HQ <= HV."""
    g, beta, state = call.g.unsqueeze(-1), call.beta, call.initial_state
    if gv is not None:
        g = g + gv.to(g.dtype)
    if beta.dim() == 3:
        beta = beta.unsqueeze(-1)
    return call._replace(
        v=call.v.flatten(2).unsqueeze(-1),
        g=g.expand(call.v.shape).flatten(2),
        beta=beta.expand(call.v.shape).flatten(2),
        initial_state=None if state is None else state.transpose(2, 3).flatten(1, 2).unsqueeze(-1),
    )


def _run(call: RuleCall, gk: torch.Tensor | None) -> Result:
    if gk is None:
        return recurrent_rule.unchecked(call)
    channel = ChannelCall(
        call.q, call.k, call.v, call.g.unsqueeze(-1) + gk.to(call.g.dtype), call.beta, None, call.erase != "off",
        call.initial_state, call.output_final_state, call.use_qk_l2norm_in_kernel, call.cu_seqlens, call.scale,
    )  # fmt: skip
    return fused_recurrent_channel_gated_delta_rule.unchecked(channel)
