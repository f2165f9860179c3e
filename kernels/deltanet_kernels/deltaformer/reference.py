"""The recursion of DeltaFormer, one token at a time: the truth for tests."""

import torch

from deltanet_kernels.deltaformer.solve import DeltaFormerCall
from deltanet_kernels.signatures import by_arguments


@by_arguments(DeltaFormerCall)
def naive_deltaformer_solve(call: DeltaFormerCall) -> torch.Tensor:
    """Arguments and results as `deltanet_kernels.deltaformer_solve`; slow, differentiable by autograd."""
    k, v, beta, scale, past_k, past_u, mask = call
    factor = k.shape[-1] ** -0.5 if scale is None else scale
    keys = k if past_k is None else torch.cat([past_k, k], dim=1)
    first = keys.shape[1] - k.shape[1]
    u = [] if past_u is None else list(past_u.unbind(1))
    for t in range(k.shape[1]):
        row = torch.ones(k.shape[0], first + t, dtype=torch.bool) if mask is None else mask[:, t, : first + t]
        seen = row.to(k.device).expand(k.shape[0], -1)
        now = v[:, t]
        if first + t:
            scores = torch.einsum("bhd,bshd->bhs", k[:, t], keys[:, : first + t]) * factor
            scores = scores.masked_fill(~seen[:, None], torch.finfo(scores.dtype).min)
            weights = scores.softmax(-1) * seen[:, None]
            now = now - beta[:, t, :, None] * torch.einsum("bhs,bshv->bhv", weights, torch.stack(u, 1))
        u.append(now)
    return torch.stack(u[first:], dim=1)
