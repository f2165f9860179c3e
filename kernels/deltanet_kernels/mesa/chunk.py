"""The Mesa layer chunk by chunk in PyTorch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.common.chunk_layout import ChunkLayout
from deltanet_kernels.common.heads import stack_queries, to_states, unstack_queries
from deltanet_kernels.common.state_scan import segment_decay, state_scan
from deltanet_kernels.gated_delta_rule.cpu import no_autocast
from deltanet_kernels.mesa.solve import STEPS, MesaSystem, solve_mesa
from deltanet_kernels.mesa.state import MesaState, check_mesa

CHUNK = 64


@torch.compiler.disable  # unrolled, its steps would take minutes to compile
def chunk_mesa(
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
    *,
    steps: int = STEPS,
) -> tuple[Tensor, MesaState | None]:
    """The Mesa layer (MesaNet, arXiv 2506.05233), differentiable; mesa/__init__.py has the rule.

    Computed in float32 (float64 for float64 inputs), because conjugate gradients do not converge in less.

    Args:
        q, k, v: queries [B, T, HQ, K], keys [B, T, H, K], values [B, T, HV, V], with the head counts of
            `chunk_gated_delta_rule`.
        g, beta: log decay, <= 0, and write weight, >= 0 [B, T, HV]; 0 and 0 leave the state as it is.
        ridge: Lambda [HV, K], positive. With less than 0.25, `steps` may not suffice for short memories.
        scale: factor of the output, K**-0.5 by default.
        initial_state: zeros by default.
        output_final_state: also return the state after the last token of each sequence.
        use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum x^2 + 1e-6).
        cu_seqlens: boundaries [N+1] of packed sequences as for `chunk_gated_delta_rule`.
        steps: steps of conjugate gradients, forward and backward.

    Returns:
        o [B, T, max(HQ, HV), V] in the dtype of v, and the final state or None.

    Raises:
        ValueError: shapes, head counts, devices or offsets that do not fit, T = 0.
        TypeError: dtypes that do not fit.
    """
    call = RuleCall(q, k, v, g, beta, scale, None, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
    before = check_mesa(call, ridge, initial_state)
    d, dtype = call.dims, before.values.dtype
    layout = ChunkLayout.of(q, min(CHUNK, d.T), cu_seqlens)
    with no_autocast(q.device):
        q_, k_, v_ = (layout.cut(x) for x in to_states(q, k, v, use_qk_l2norm_in_kernel, dtype))
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
        x = solve_mesa(MesaSystem(H, lam, keys, weight, start), rows, steps)
        o = start * (x @ S) + ((x @ keys.mT) * weight) @ values
        o = unstack_queries(call.factor * o.unflatten(0, (-1, d.HV)), layout.size)
    if not output_final_state:
        return layout.join(o).to(v.dtype), None
    S, H = layout.unsort(final).split([d.V, d.K], dim=-1)
    return layout.join(o).to(v.dtype), MesaState(S.contiguous(), H.contiguous())
