"""The Mesa layer token by token, for decoding: no gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from deltanet_kernels.common.device import no_autocast
from deltanet_kernels.common.heads import to_states
from deltanet_kernels.mesa.calls import MesaCall, MesaState, check_mesa
from deltanet_kernels.mesa.solve import STEPS, MesaSystem, conjugate_gradients


@torch.no_grad()
def recurrent_mesa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ridge: Tensor,
    scale: float | None = None,
    initial_state: MesaState | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    steps: int = STEPS,
) -> tuple[Tensor, MesaState]:
    """One or a few tokens; arguments and results as `chunk_mesa`, with the final state and without gradients."""
    call = MesaCall(q, k, v, g, beta, ridge, scale, initial_state, True, use_qk_l2norm_in_kernel)
    check_mesa(call)
    rule, (S, H) = call.rule, call.first_state()
    d, dtype = rule.dims, S.dtype
    with no_autocast(q.device):
        q_, k_, v_ = to_states(q, k, v, use_qk_l2norm_in_kernel, dtype)
        rows = q_.unflatten(2, (d.HV, -1))  # [B, T, HV, R, K]
        decay, lam = g.to(dtype).exp(), ridge.to(dtype).repeat(d.B, 1).unsqueeze(1)
        outputs = []
        for t in range(d.T):
            key, factor = k_[:, t].unsqueeze(-1), decay[:, t, :, None, None]
            write = beta[:, t, :, None, None].to(dtype) * key.mT  # [B, HV, 1, K]
            S = factor * S + write.mT * v_[:, t].unsqueeze(-2)
            H = factor * H + key * write
            system = MesaSystem(H.flatten(0, 1), lam)
            x = conjugate_gradients(system, rows[:, t].flatten(0, 1), steps).view_as(rows[:, t])
            outputs.append((rule.factor * (x @ S)).flatten(1, 2))
        return torch.stack(outputs, dim=1).to(v.dtype), MesaState(S, H)
