"""The Mesa layer token by token with a direct solver: the truth for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from deltanet_kernels.common.heads import spans, to_states
from deltanet_kernels.mesa.calls import MesaCall, MesaState, check_mesa
from deltanet_kernels.signatures import by_arguments


@by_arguments(MesaCall)
def naive_mesa(call: MesaCall) -> tuple[Tensor, MesaState | None]:
    """Arguments and results as `chunk_mesa`; slow, differentiable by autograd, exact to the dtype of its inputs."""
    check_mesa(call)
    rule, before = call.rule, call.first_state()
    d, dtype = rule.dims, before.values.dtype
    q, k, v = to_states(call.q, call.k, call.v, call.use_qk_l2norm_in_kernel, dtype)
    decay, beta, lam = call.g.to(dtype).exp(), call.beta.to(dtype), torch.diag_embed(call.ridge.to(dtype))
    outputs, ends = [], []
    for rows, start, end in spans(d.B, d.T, call.cu_seqlens):
        S, H = before.values[rows], before.keys[rows]
        for t in range(start, end):
            key, weight = k[:, t].unsqueeze(-1), beta[:, t, :, None, None]
            S = decay[:, t, :, None, None] * S + weight * key * v[:, t].unsqueeze(-2)
            H = decay[:, t, :, None, None] * H + weight * key * key.mT
            x = torch.linalg.solve(H + lam, q[:, t].unflatten(1, (d.HV, -1)).mT)  # [B, HV, K, R]
            outputs.append(rule.factor * (x.mT @ S).flatten(1, 2))
        ends.append(MesaState(S, H))
    outputs += [v.new_zeros(d.B, d.HO, d.V)] * (d.T - len(outputs))
    final = MesaState(*(torch.cat(parts) for parts in zip(*ends, strict=True)))
    return torch.stack(outputs, dim=1).to(call.v.dtype), final if call.output_final_state else None
