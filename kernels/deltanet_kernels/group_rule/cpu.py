"""The rule read at boundaries in plain PyTorch: any device, differentiable by autograd.

With G the inclusive sum of g within a group of C tokens, rev_i = e^{G_C - G_i}, and L = tril(beta * D * K K^T, -1) of
gated_delta_rule/cpu.py, what a group does to the state is affine:

    (I + L) [U, W] = [beta V, beta e^G K]
    S <- (e^{G_C} I - K^T (rev W)) S + K^T (rev U)

so that all groups are computed at once, and only the states pass from one to the next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltanet_kernels.common.chunk_layout import ChunkLayout
from deltanet_kernels.common.device import no_autocast
from deltanet_kernels.common.heads import stack_queries, to_states, unstack_queries
from deltanet_kernels.common.state_scan import segment_decay, state_scan
from deltanet_kernels.group_rule.calls import GROUP, GroupRuleCall


@torch.compiler.disable  # unrolled, its groups would take minutes to compile
def chunk_group_torch(call: GroupRuleCall) -> tuple[Tensor, Tensor | None]:
    """`deltanet_kernels.chunk_group_gated_delta_rule` for checked arguments; float32, or float64 for float64 inputs."""
    q, k, v, g, beta = call[:5]
    dims, factor = call.rule.dims, call.rule.factor
    dtype = torch.promote_types(q.dtype, torch.float32)
    layout = ChunkLayout.of(q, GROUP, call.cu_seqlens)
    initial = call.initial_state
    if initial is None:
        initial = v.new_zeros(dims.N, dims.HV, dims.K, dims.V, dtype=dtype)
    with no_autocast(q.device):
        q, k, v = (layout.cut(x) for x in to_states(q, k, v, call.use_qk_l2norm_in_kernel, dtype))
        g, beta = layout.cut(g.to(dtype)), layout.cut(beta.to(dtype)).unsqueeze(-1)  # [M, HV, C], [M, HV, C, 1]
        decay, since = segment_decay(g), g.cumsum(-1).exp().unsqueeze(-1)
        system = (beta * decay * (k @ k.mT)).tril(-1)
        known = torch.cat([beta * v, beta * since * k], dim=-1)
        values, erased = torch.linalg.solve_triangular(
            system, known, upper=False, unitriangular=True
        ).split([dims.V, dims.K], dim=-1)  # fmt: skip
        writes = (decay[..., -1, :].unsqueeze(-1) * k).mT
        unit = torch.eye(dims.K, dtype=dtype, device=q.device)
        transition, initial = since[..., -1:, :] * unit - writes @ erased, layout.sort(initial)
        states, final = state_scan(transition, writes @ values, initial, layout.counts)
        o = unstack_queries(factor * (stack_queries(q, dims.HV) @ states), layout.size)
    return layout.join(o).to(call.v.dtype), layout.unsort(final) if call.output_final_state else None
