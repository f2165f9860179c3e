"""Titans' memory token by token: the truth for tests, and the form for decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from deltanet_kernels.common.device import no_autocast
from deltanet_kernels.common.heads import spans, to_states
from deltanet_kernels.signatures import by_arguments
from deltanet_kernels.titans.calls import TitansCall, TitansState, check_titans


@by_arguments(TitansCall)
def naive_titans(call: TitansCall) -> tuple[Tensor, TitansState | None]:
    """Arguments and results as `chunk_titans`; slow, differentiable by autograd, exact to the dtype of its inputs."""
    before, rule = check_titans(call), call.rule
    d, dtype = rule.dims, before.memory.dtype
    outputs, ends = [], []
    with no_autocast(call.q.device):
        q, k, v = to_states(call.q, call.k, call.v, call.use_qk_l2norm_in_kernel, dtype)
        decay, mu, theta = call.g.to(dtype).exp(), call.log_mu.to(dtype).exp(), call.theta.to(dtype)
        for rows, start, end in spans(d.B, d.T, call.cu_seqlens):
            M, Z = before.memory[rows], before.momentum[rows]
            for t in range(start, end):
                key = k[:, t].unsqueeze(-1)
                wrong = v[:, t].unsqueeze(-2) - key.mT @ M
                Z_new = mu[:, t, :, None, None] * Z + theta[:, t, :, None, None] * key * wrong
                M_new = decay[:, t, :, None, None] * M + Z_new
                if call.padding is not None:
                    skip = call.padding[:, t, None, None, None]
                    Z_new, M_new = torch.where(skip, Z, Z_new), torch.where(skip, M, M_new)
                M, Z = M_new, Z_new
                outputs.append(rule.factor * (q[:, t].unflatten(1, (d.HV, -1)) @ M).flatten(1, 2))
            ends.append(TitansState(M, Z))
    outputs += [v.new_zeros(d.B, d.HO, d.V)] * (d.T - len(outputs))
    final = TitansState(*(torch.cat(parts) for parts in zip(*ends, strict=True)))
    return torch.stack(outputs, dim=1).to(call.v.dtype), final if call.output_final_state else None
