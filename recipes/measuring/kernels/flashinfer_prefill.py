"""FlashInfer's prefill of the gated delta rule, beside the operators of this package.

FlashInfer has the forward pass only. It takes rows behind one another, decay factors exp(g) instead of log decays, and
q and k that the caller has normalised; early releases ignore the argument that names the normalisation. All of this is
prepared outside the timed call, which therefore does less than the other implementations' calls do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from deltanet_kernels.common.heads import l2_normalize

Rule = Callable[..., torch.Tensor]


def rule() -> Rule:
    """FlashInfer's function; ImportError without the package."""
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    return chunk_gated_delta_rule


def prepare(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs of `forward` from q, k (B, T, H, K), v (B, T, HV, V), log decays g and beta (B, T, HV).

    Returns q and k normalised, v, exp(g) and beta in float32, all detached and with the rows behind one another (B * T
    first), and the offsets of the rows (B + 1, int64).
    """
    q, k, v, g, beta = (x.detach() for x in leaves)
    rows, tokens = q.shape[:2]
    q, k = (l2_normalize(x.float()).to(x.dtype) for x in (q, k))
    offsets = torch.arange(0, rows * tokens + 1, tokens, device=q.device)
    flat = [x.flatten(0, 1).contiguous() for x in (q, k, v, g.float().exp(), beta.float())]
    return [*flat, offsets]


def forward(
    flashinfer_rule: Rule,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """o (B, T, HV, V) of the inputs that `prepare` returns."""
    o = flashinfer_rule(q, k, v, g=alpha, beta=beta, cu_seqlens=offsets)
    return o.unflatten(0, (offsets.numel() - 1, -1))
