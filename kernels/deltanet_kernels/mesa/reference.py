"""The Mesa layer token by token with a direct solver: the truth for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from deltanet_kernels.common.heads import spans, to_states
from deltanet_kernels.mesa.calls import MesaCall, MesaState, check_mesa


def naive_mesa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ridge: Tensor,
    scale: float | None = None,
    initial_state: MesaState | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, MesaState | None]:
    """Arguments and results as `chunk_mesa`; slow, differentiable by autograd, exact to the dtype of its inputs."""
    call = MesaCall(
        q, k, v, g, beta, ridge, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )
    check_mesa(call)
    rule, before = call.rule, call.first_state()
    d, dtype = rule.dims, before.values.dtype
    q_, k_, v_ = to_states(q, k, v, use_qk_l2norm_in_kernel, dtype)
    decay, beta, lam = g.to(dtype).exp(), beta.to(dtype), torch.diag_embed(ridge.to(dtype))
    outputs, ends = [], []
    for rows, start, end in spans(d.B, d.T, cu_seqlens):
        S, H = before.values[rows], before.keys[rows]
        for t in range(start, end):
            key, weight = k_[:, t].unsqueeze(-1), beta[:, t, :, None, None]
            S = decay[:, t, :, None, None] * S + weight * key * v_[:, t].unsqueeze(-2)
            H = decay[:, t, :, None, None] * H + weight * key * key.mT
            x = torch.linalg.solve(H + lam, q_[:, t].unflatten(1, (d.HV, -1)).mT)  # [B, HV, K, R]
            outputs.append(rule.factor * (x.mT @ S).flatten(1, 2))
        ends.append(MesaState(S, H))
    outputs += [v_.new_zeros(d.B, d.HO, d.V)] * (d.T - len(outputs))
    final = MesaState(*(torch.cat(parts) for parts in zip(*ends, strict=True)))
    return torch.stack(outputs, dim=1).to(v.dtype), final if output_final_state else None
