"""Titans' memory chunk by chunk in PyTorch, on any device.

Let M_0 and Z_0 be memory and momentum before a chunk, and u_s = theta_s (v_s - M_{s-1}^T k_s) the step of token s. Both
recurrences are linear in the steps:

    M_t = A_t M_0 + f_t Z_0 + sum_s c_ts k_s u_s^T        Z_t = p_t Z_0 + sum_s e^{m_{s+1} + ... + m_t} k_s u_s^T

A_t = e^{g_1 + ... + g_t} and p_t likewise of m. A step s enters the momentum of every later token r, and from there the
memory, where it decays: with the matrices Dg_tr = e^{g_{r+1} + ... + g_t} and Dm of m (both 0 above the diagonal),
c = Dg Dm and f = Dg p. The steps follow from one triangular system, as in the delta rule, with c one token earlier:

    (I + theta * tril(K K^T * c_{t-1}, -1)) u = theta * (V - A_{t-1} K M_0 - f_{t-1} K Z_0)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from deltanet_kernels.common.chunk_layout import ChunkLayout
from deltanet_kernels.common.device import no_autocast
from deltanet_kernels.common.heads import stack_queries, to_states, unstack_queries
from deltanet_kernels.common.state_scan import segment_decay, state_scan
from deltanet_kernels.signatures import by_arguments
from deltanet_kernels.titans.calls import TitansCall, TitansState, check_titans

CHUNK = 64


@torch.compiler.disable  # unrolled, its steps would take minutes to compile
@by_arguments(TitansCall)
def chunk_titans(call: TitansCall) -> tuple[Tensor, TitansState | None]:
    """Titans' memory with a linear inner model (arXiv 2501.00663), differentiable; titans/__init__.py has the rule.

    Computed in float32 (float64 for float64 inputs).

    Args:
        q, k, v: queries [B, T, HQ, K], keys [B, T, H, K], values [B, T, HV, V], with the head counts of
            `chunk_gated_delta_rule`.
        g, log_mu: logarithms of decay and momentum, <= 0; -inf is allowed [B, T, HV].
        theta: step size [B, T, HV]. Repeated unit keys are stable for theta < (1 + e^g) (1 + mu).
        scale: factor of the output, K**-0.5 by default.
        initial_state: zeros by default.
        output_final_state: also return the state after the last token of each sequence.
        use_qk_l2norm_in_kernel: replace q and k by x * rsqrt(sum x^2 + 1e-6).
        cu_seqlens: boundaries [N+1] of packed sequences as for `chunk_gated_delta_rule`.
        padding: [B, T] bool, True at tokens that leave the state as it is; no gates would, because momentum moves the
            memory at every token. Their outputs have no meaning.

    Returns:
        o [B, T, max(HQ, HV), V] in the dtype of v, and the final state or None.

    Raises:
        ValueError: shapes, head counts, devices or offsets that do not fit, T = 0.
        TypeError: dtypes that do not fit.
    """
    before, rule = check_titans(call), call.rule
    d, dtype = rule.dims, before.memory.dtype
    q, k, v, g, log_mu, theta = call[:6]
    layout = ChunkLayout.of(q, min(CHUNK, d.T), call.cu_seqlens)
    moves = torch.ones_like(g, dtype=dtype)
    if call.padding is not None:
        skip = call.padding.unsqueeze(-1)
        moves = moves.masked_fill(skip, 0.0)
        g, log_mu, theta = (gate.masked_fill(skip, 0.0) for gate in (g, log_mu, theta))
    with no_autocast(q.device):
        q_, k_, v_ = (layout.cut(x) for x in to_states(q, k, v, call.use_qk_l2norm_in_kernel, dtype))
        g, log_mu, theta, moves = (layout.cut(x.to(dtype)) for x in (g, log_mu, theta, moves))  # [M, HV, C]
        A, p = g.cumsum(-1).exp(), log_mu.cumsum(-1).exp()
        Dg, Dm = segment_decay(g) * moves.unsqueeze(-2), segment_decay(log_mu)
        c, f = Dg @ Dm, (Dg @ p.unsqueeze(-1)).squeeze(-1)

        earlier = F.pad(c, (0, 0, 1, 0))[..., :-1, :]  # c_{t-1,s}, 0 for s >= t
        eye = torch.eye(layout.size, dtype=dtype, device=q.device)
        system = eye + theta.unsqueeze(-1) * (k_ @ k_.mT) * earlier
        A_before, f_before = F.pad(A, (1, 0), value=1.0)[..., :-1], F.pad(f, (1, 0))[..., :-1]
        right = torch.cat([v_, A_before.unsqueeze(-1) * k_, f_before.unsqueeze(-1) * k_], dim=-1)
        solved = torch.linalg.solve_triangular(
            system, theta.unsqueeze(-1) * right, upper=False, unitriangular=True
        )  # fmt: skip
        U, W = solved.split([d.V, 2 * d.K], dim=-1)  # u = U - W [M_0; Z_0]

        write = torch.cat([c[..., -1, :, None] * k_, Dm[..., -1, :, None] * k_], dim=-1).mT  # [M, HV, 2K, C]
        eye = torch.eye(d.K, dtype=dtype, device=q.device)
        last = (x[..., -1, None, None] * eye for x in (A, f, p))
        transition = _upper(*last) - write @ W
        initial = layout.sort(torch.cat(before, dim=-2))
        states, final = state_scan(transition, write @ U, initial, layout.counts)

        u = U - W @ states
        rows, repeats = stack_queries(q_, d.HV), d.HO // d.HV
        read = torch.cat(
            [A.repeat(1, 1, repeats).unsqueeze(-1) * rows, f.repeat(1, 1, repeats).unsqueeze(-1) * rows], -1
        )
        o = read @ states + ((rows @ k_.mT) * c.repeat(1, 1, repeats, 1)) @ u
        o = layout.join(unstack_queries(rule.factor * o, layout.size)).to(v.dtype)
    if not call.output_final_state:
        return o, None
    M, Z = layout.unsort(final).split(d.K, dim=-2)
    return o, TitansState(M.contiguous(), Z.contiguous())


def _upper(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The matrix [[a, b], [0, c]]."""
    return torch.cat([torch.cat([a, b], dim=-1), torch.cat([torch.zeros_like(a), c], dim=-1)], dim=-2)
