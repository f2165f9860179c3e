"""Test-time training with layer norm and residual in the inner model (TTT-Linear), one mini-batch after the other.

The gradient is not linear in the weights, so no chunk is larger than a mini-batch. Within one, with B and S before
it, G the sum of g and D_ts = e^{g_{s+1} + ... + g_t}:

    u = -eta * dL/dz at z = [K,1] W_0 + e^G [K,1] B
    O = Q + LN([Q,1] W_0 + e^G [Q,1] S + (D * [Q,1] [K,1]^T) u)
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.common.chunk_layout import ChunkLayout
from deltanet_kernels.common.heads import stack_queries, unstack_queries
from deltanet_kernels.common.state_scan import segment_decay
from deltanet_kernels.ttt.calls import InnerNorm, TTTState
from deltanet_kernels.ttt.inner_norm import loss_gradient, normalise, with_one


def norm_batches(
    call: RuleCall, mini_batch: int, norm: InnerNorm, before: TTTState, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments and results as `linear_chunks`."""
    d = call.dims
    layout = ChunkLayout.of(call.q, mini_batch, call.cu_seqlens)
    q, k, v, g, eta = (layout.cut(x) for x in call[:5])
    G, D = g.cumsum(-1).exp(), segment_decay(g)
    q, repeats = stack_queries(q, d.HV), d.HO // d.HV
    q_one, k_one = with_one(q), with_one(k)
    asks, reads = G.repeat(1, 1, repeats).unsqueeze(-1) * q_one, G.unsqueeze(-1) * k_one
    pairs = D.repeat(1, 1, repeats, 1) * (q_one @ k_one.mT)
    writes, total = (D[..., -1, :, None] * k_one).mT, G[..., -1, None, None]
    known = k_one @ norm.first
    parts = (x.split(layout.counts) for x in (asks, pairs, known, reads, writes, total, v - k, eta.unsqueeze(-1)))

    S, pending, ends = layout.sort(before.weight), layout.sort(before.pending), layout.sort(ends)
    outputs = []
    for number, (ask, pair, start, read, write, decay, wanted, step) in enumerate(zip(*parts, strict=True)):
        count = len(ask)
        base, own = S[:count] - pending[:count], pending[:count]
        u = -step * loss_gradient(start + read @ base, wanted, norm)
        outputs.append(ask @ S[:count] + pair @ u)
        written = write @ u
        complete = (ends[:count] >= (number + 1) * mini_batch)[:, None, None, None]
        idle = (ends[:count] <= number * mini_batch)[:, None, None, None]  # a shorter row has ended before
        own = torch.where(idle, own, torch.where(complete, 0.0, decay * own + written))
        S = torch.cat([decay * S[:count] + written, S[count:]])
        pending = torch.cat([own, pending[count:]])
    z = q_one @ norm.first
    if outputs:
        z = z + torch.cat(outputs)
    o = unstack_queries(q + normalise(z, norm), mini_batch)
    return layout.join(o), layout.unsort(S), layout.unsort(pending)
