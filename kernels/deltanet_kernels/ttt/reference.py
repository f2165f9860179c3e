"""Test-time training token by token, both forms: the truth for tests, and the form for decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.common.device import no_autocast
from deltanet_kernels.common.heads import spans, to_states
from deltanet_kernels.ttt.inner_norm import loss_gradient, normalise, with_one
from deltanet_kernels.ttt.state import InnerNorm, TTTState, check_ttt


def naive_ttt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    eta: Tensor,
    mini_batch: int,
    norm: InnerNorm | None = None,
    scale: float | None = None,
    initial_state: TTTState | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    padding: Tensor | None = None,
) -> tuple[Tensor, TTTState | None]:
    """Arguments and results as `chunk_ttt`; slow, differentiable by autograd, exact to the dtype of its inputs."""
    call = RuleCall(q, k, v, g, eta, scale, None, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
    before = check_ttt(call, mini_batch, norm, initial_state, padding)
    d, dtype = call.dims, before.weight.dtype
    outputs, ends = [], []
    with no_autocast(q.device):
        q_, k_, v_ = to_states(q, k, v, use_qk_l2norm_in_kernel, dtype)
        decay, eta = g.to(dtype).exp(), eta.to(dtype)
        norm = None if norm is None else InnerNorm(*(x.to(dtype) for x in norm))
        for rows, start, end in spans(d.B, d.T, cu_seqlens):
            S, pending, count = (x[rows] for x in before)
            for t in range(start, end):
                query = q_[:, t].unflatten(1, (d.HV, -1))  # [B, HV, R, K]
                key, value = k_[:, t].unsqueeze(-2), v_[:, t].unsqueeze(-2)  # [B, HV, 1, K], [B, HV, 1, V]
                factor = decay[:, t, :, None, None]
                base = factor * (S - pending)
                if norm is None:
                    read, wrong = key, value - key @ base
                else:
                    read = with_one(key)
                    wrong = -loss_gradient(read @ (norm.first + base), value - key, norm)
                written = eta[:, t, :, None, None] * read.mT * wrong
                S_new, pending_new = factor * S + written, factor * pending + written
                count_new = count + 1
                over = count_new == mini_batch
                pending_new = torch.where(over[:, None, None, None], 0.0, pending_new)
                count_new = torch.where(over, 0, count_new)
                if padding is not None:
                    skip = padding[:, t]
                    S_new = torch.where(skip[:, None, None, None], S, S_new)
                    pending_new = torch.where(skip[:, None, None, None], pending, pending_new)
                    count_new = torch.where(skip, count, count_new)
                S, pending, count = S_new, pending_new, count_new
                if norm is None:
                    outputs.append(call.factor * (query @ S).flatten(1, 2))
                else:
                    outputs.append((query + normalise(with_one(query) @ (norm.first + S), norm)).flatten(1, 2))
            ends.append(TTTState(S, pending, count))
    outputs += [v_.new_zeros(d.B, d.HO, d.V)] * (d.T - len(outputs))
    final = TTTState(*(torch.cat(parts) for parts in zip(*ends, strict=True)))
    return torch.stack(outputs, dim=1).to(v.dtype), final if output_final_state else None
