"""The Mesa layer chunk by chunk in PyTorch: CPU tensors, and CUDA calls that the kernels do not support."""

from __future__ import annotations

import torch
from torch import Tensor

from deltanet_kernels.common.chunk_layout import ChunkLayout
from deltanet_kernels.common.device import no_autocast
from deltanet_kernels.common.heads import stack_queries, to_states, unstack_queries
from deltanet_kernels.common.state_scan import segment_decay, state_scan
from deltanet_kernels.mesa.calls import MesaCall, MesaState
from deltanet_kernels.mesa.solve import MesaSystem, solve_mesa

CHUNK = 64


@torch.compiler.disable  # unrolled, its steps would take minutes to compile
def chunk_mesa_torch(call: MesaCall) -> tuple[Tensor, MesaState | None]:
    """`deltanet_kernels.chunk_mesa` in PyTorch, for checked arguments."""
    q, k, v, g, beta, ridge = call[:6]
    rule, before = call.rule, call.first_state()
    d, dtype = rule.dims, before.values.dtype
    layout = ChunkLayout.of(q, min(CHUNK, d.T), call.cu_seqlens)
    with no_autocast(q.device):
        q_, k_, v_ = (layout.cut(x) for x in to_states(q, k, v, call.use_qk_l2norm_in_kernel, dtype))
        g, beta = layout.cut(g.to(dtype)), layout.cut(beta.to(dtype))  # [M, HV, C]
        start, weight = g.cumsum(-1).exp(), segment_decay(g) * beta.unsqueeze(-2)
        written = (k_ * weight[..., -1, :, None]).mT @ torch.cat([v_, k_], dim=-1)  # [M, HV, K, V + K]
        initial = layout.sort(torch.cat(before, dim=-1))
        states, final = state_scan(start[..., -1:, None], written, initial, layout.counts)

        rows = stack_queries(q_, d.HV).flatten(0, 1)  # [N, R*C, K]
        repeats = d.HO // d.HV
        weight, start = weight.repeat(1, 1, repeats, 1).flatten(0, 1), start.repeat(1, 1, repeats).flatten(0, 1)
        start = start.unsqueeze(-1)
        S, H = states.flatten(0, 1).split([d.V, d.K], dim=-1)
        keys, values = k_.flatten(0, 1), v_.flatten(0, 1)
        lam = ridge.to(dtype).repeat(len(q_), 1).unsqueeze(1)
        x = solve_mesa(MesaSystem(H, lam, keys, weight, start), rows, call.steps)
        o = start * (x @ S) + ((x @ keys.mT) * weight) @ values
        o = unstack_queries(rule.factor * o.unflatten(0, (-1, d.HV)), layout.size)
    if not call.output_final_state:
        return layout.join(o).to(v.dtype), None
    S, H = layout.unsort(final).split([d.V, d.K], dim=-1)
    return layout.join(o).to(v.dtype), MesaState(S.contiguous(), H.contiguous())
