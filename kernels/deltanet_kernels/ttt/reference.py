"""Test-time training token by token, both forms: the truth for tests, and the form for decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from deltanet_kernels.common.device import no_autocast
from deltanet_kernels.common.heads import spans, to_states
from deltanet_kernels.signatures import by_arguments
from deltanet_kernels.ttt.calls import InnerNorm, TTTCall, TTTState, check_ttt
from deltanet_kernels.ttt.inner_norm import loss_gradient, normalise, with_one


@by_arguments(TTTCall)
def naive_ttt(call: TTTCall) -> tuple[Tensor, TTTState | None]:
    """Arguments and results as `chunk_ttt`; slow, differentiable by autograd, exact to the dtype of its inputs."""
    before, rule = check_ttt(call), call.rule
    d, dtype = rule.dims, before.weight.dtype
    outputs, ends = [], []
    with no_autocast(call.q.device):
        q, k, v = to_states(call.q, call.k, call.v, call.use_qk_l2norm_in_kernel, dtype)
        decay, eta = call.g.to(dtype).exp(), call.eta.to(dtype)
        norm = None if call.norm is None else InnerNorm(*(x.to(dtype) for x in call.norm))
        for rows, start, end in spans(d.B, d.T, call.cu_seqlens):
            S, pending, count = (x[rows] for x in before)
            for t in range(start, end):
                query = q[:, t].unflatten(1, (d.HV, -1))  # [B, HV, R, K]
                key, value = k[:, t].unsqueeze(-2), v[:, t].unsqueeze(-2)  # [B, HV, 1, K], [B, HV, 1, V]
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
                over = count_new == call.mini_batch
                pending_new = torch.where(over[:, None, None, None], 0.0, pending_new)
                count_new = torch.where(over, 0, count_new)
                if call.padding is not None:
                    skip = call.padding[:, t]
                    S_new = torch.where(skip[:, None, None, None], S, S_new)
                    pending_new = torch.where(skip[:, None, None, None], pending, pending_new)
                    count_new = torch.where(skip, count, count_new)
                S, pending, count = S_new, pending_new, count_new
                if norm is None:
                    outputs.append(rule.factor * (query @ S).flatten(1, 2))
                else:
                    outputs.append((query + normalise(with_one(query) @ (norm.first + S), norm)).flatten(1, 2))
            ends.append(TTTState(S, pending, count))
    outputs += [v.new_zeros(d.B, d.HO, d.V)] * (d.T - len(outputs))
    final = TTTState(*(torch.cat(parts) for parts in zip(*ends, strict=True)))
    return torch.stack(outputs, dim=1).to(call.v.dtype), final if call.output_final_state else None
