"""The delta rule with a decay per key channel, token by token: what every other form is compared with.

Per state S [K, V], with a log decay g_t [K], a write key k_t and an erase key p_t (k_t itself by default):

    S_t = Diag(e^{g_t}) S_{t-1} + beta_t k_t (v_t - p_t^T Diag(e^{g_t}) S_{t-1})^T        o_t = scale * q_t^T S_t

This is Kimi Delta Attention (arXiv 2510.26692); with p_t = b_t * k_t the rule of Gated DeltaNet-2 (arXiv 2605.22791);
without erasing, S_t = Diag(e^{g_t}) S_{t-1} + beta_t k_t v_t^T, gated linear attention (arXiv 2312.06635).
"""

from __future__ import annotations

import torch

from deltanet_kernels.channel_gates.calls import ChannelCall, check_channel_rule
from deltanet_kernels.common.heads import l2_normalize, spans
from deltanet_kernels.signatures import by_arguments


@by_arguments(ChannelCall)
def naive_channel_gated_delta_rule(call: ChannelCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recurrence in the widest dtype among the inputs; slow, and differentiable by autograd.

    Arguments, results and errors as `deltanet_kernels.chunk_channel_gated_delta_rule`.
    """
    check_channel_rule(call)
    dims = call.dims
    q, k, v, g, beta = call[:5]
    dtype = torch.promote_types(torch.promote_types(q.dtype, g.dtype), beta.dtype)
    q, k, v, beta, decay = q.to(dtype), k.to(dtype), v.to(dtype), beta.to(dtype), g.to(dtype).exp()
    if call.use_qk_l2norm_in_kernel:
        q, k = l2_normalize(q), l2_normalize(k)
    k = k.repeat_interleave(dims.HV // dims.H, dim=2)
    q = q.repeat_interleave(dims.HO // dims.HQ, dim=2) * call.factor
    p = k if call.erase_key is None else call.erase_key.to(dtype)

    outputs: list[torch.Tensor] = []  # per token [rows, HO, V]
    states: list[torch.Tensor] = []
    for rows, start, end in spans(dims.B, dims.T, call.cu_seqlens):
        state = v.new_zeros(rows.stop - rows.start, dims.HV, dims.K, dims.V)
        if call.initial_state is not None:
            state = call.initial_state[rows].to(dtype)
        for t in range(start, end):
            state = state * decay[:, t].unsqueeze(-1)
            wanted = v[:, t]
            if call.erase:
                wanted = wanted - (state * p[:, t].unsqueeze(-1)).sum(-2)
            state = state + k[:, t].unsqueeze(-1) * (beta[:, t].unsqueeze(-1) * wanted).unsqueeze(-2)
            heads = state.repeat_interleave(dims.HO // dims.HV, dim=1)
            outputs.append((heads * q[:, t].unsqueeze(-1)).sum(-2))
        states.append(state)
    outputs += [v.new_zeros(dims.B, dims.HO, dims.V)] * (dims.T - len(outputs))
    o = torch.stack(outputs, dim=1).to(call.v.dtype)
    return o, torch.cat(states) if call.output_final_state else None
