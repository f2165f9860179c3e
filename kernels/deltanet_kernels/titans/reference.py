"""Titans' memory token by token: the truth for tests, and the form for decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.common.device import no_autocast
from deltanet_kernels.common.heads import spans, to_states
from deltanet_kernels.titans.state import TitansState, check_titans


def naive_titans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    log_mu: Tensor,
    theta: Tensor,
    scale: float | None = None,
    initial_state: TitansState | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    padding: Tensor | None = None,
) -> tuple[Tensor, TitansState | None]:
    """Arguments and results as `chunk_titans`; slow, differentiable by autograd, exact to the dtype of its inputs."""
    call = RuleCall(q, k, v, g, theta, scale, None, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
    before = check_titans(call, log_mu, initial_state, padding)
    d, dtype = call.dims, before.memory.dtype
    outputs, ends = [], []
    with no_autocast(q.device):
        q_, k_, v_ = to_states(q, k, v, use_qk_l2norm_in_kernel, dtype)
        decay, mu, theta = g.to(dtype).exp(), log_mu.to(dtype).exp(), theta.to(dtype)
        for rows, start, end in spans(d.B, d.T, cu_seqlens):
            M, Z = before.memory[rows], before.momentum[rows]
            for t in range(start, end):
                key = k_[:, t].unsqueeze(-1)
                wrong = v_[:, t].unsqueeze(-2) - key.mT @ M
                Z_new = mu[:, t, :, None, None] * Z + theta[:, t, :, None, None] * key * wrong
                M_new = decay[:, t, :, None, None] * M + Z_new
                if padding is not None:
                    skip = padding[:, t, None, None, None]
                    Z_new, M_new = torch.where(skip, Z, Z_new), torch.where(skip, M, M_new)
                M, Z = M_new, Z_new
                outputs.append(call.factor * (q_[:, t].unflatten(1, (d.HV, -1)) @ M).flatten(1, 2))
            ends.append(TitansState(M, Z))
    outputs += [v_.new_zeros(d.B, d.HO, d.V)] * (d.T - len(outputs))
    final = TitansState(*(torch.cat(parts) for parts in zip(*ends, strict=True)))
    return torch.stack(outputs, dim=1).to(v.dtype), final if output_final_state else None
