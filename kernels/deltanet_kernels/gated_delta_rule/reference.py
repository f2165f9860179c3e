"""Plain PyTorch forms of the operators: the recurrence as the truth, the short convolution, the gated norm.

The gated delta rule (Gated Delta Networks, arXiv 2412.06464, equation 10), per state S [K, V]:

    S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - k_t^T e^{g_t} S_{t-1})^T        o_t = scale * q_t^T S_t

and the forms that `erase` chooses:

    S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - k_t^T R_t)^T
    R_t = e^{g_t} S_{t-1} (decayed), S_{t-1} (undecayed) or 0 (off)
"""

import functools

import torch
import torch.nn.functional as F

from deltanet_kernels import checks
from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.common.heads import l2_normalize, spans
from deltanet_kernels.signatures import by_arguments


def log_decay_and_strength(
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    use_beta_sigmoid_in_kernel: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay and write strength [B, T, HV] in `dtype` from the raw logits (A_log given) or as they are."""
    g, beta = g.to(dtype), beta.to(dtype)
    if A_log is not None:
        g = -A_log.to(dtype).exp() * F.softplus(g if dt_bias is None else g + dt_bias.to(dtype))
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid()
    return g, beta


@by_arguments(RuleCall)
def naive_gated_delta_rule(call: RuleCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recurrence, one token at a time, in the widest dtype among the inputs: the truth for tests.

    Arguments and results as `deltanet_kernels.chunk_gated_delta_rule`, the output in the dtype of v; slow,
    differentiable by autograd, and with float64 inputs exact to float64.
    """
    checks.check_delta_rule(call, drop_in=True)
    dims = call.dims
    q, k, v, g, beta = call[:5]
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in (q, k, v, g, beta)))
    g, beta = log_decay_and_strength(g, beta, call.A_log, call.dt_bias, call.use_beta_sigmoid_in_kernel, dtype)
    if call.allow_neg_eigval:
        beta = 2 * beta
    q_, k_, v_ = q.to(dtype), k.to(dtype), v.to(dtype)
    if call.use_qk_l2norm_in_kernel:
        q_, k_ = l2_normalize(q_), l2_normalize(k_)
    k_ = k_.repeat_interleave(dims.HV // dims.H, dim=2)
    q_ = q_.repeat_interleave(dims.HO // dims.HQ, dim=2) * call.factor
    queries_per_state = dims.HO // dims.HV

    decay = g.exp()

    outputs: list[torch.Tensor] = []  # per token [rows, HO, V]
    states: list[torch.Tensor] = []
    for rows, start, end in spans(dims.B, dims.T, call.cu_seqlens):
        state = v_.new_zeros(rows.stop - rows.start, dims.HV, dims.K, dims.V)
        if call.initial_state is not None:
            state = call.initial_state[rows].to(dtype)
            state = state.mT if call.state_v_first else state
        for t in range(start, end):
            fade = decay[:, t, :, None, None]
            value, decayed = v_[:, t], fade * state
            if call.erase != "off":
                read = state if call.erase == "undecayed" else decayed
                value = value - (read * k_[:, t].unsqueeze(-1)).sum(-2)
            delta = beta[:, t, :, None] * value
            state = decayed + k_[:, t].unsqueeze(-1) * delta.unsqueeze(-2)
            heads = state.repeat_interleave(queries_per_state, dim=1) if queries_per_state > 1 else state
            outputs.append((heads * q_[:, t].unsqueeze(-1)).sum(-2))
        states.append(state.mT if call.state_v_first else state)
    outputs += [v_.new_zeros(dims.B, dims.HO, dims.V)] * (dims.T - len(outputs))
    o = torch.stack(outputs, dim=1).to(v.dtype)
    return o, torch.cat(states) if call.output_final_state else None
