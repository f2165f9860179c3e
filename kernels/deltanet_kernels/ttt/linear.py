"""Test-time training with the plain linear inner model, chunk by chunk in PyTorch, on any device.

It is the chunk form of the gated delta rule in which a token's prediction misses the writes of its own mini-batch. With
G the sum of g over a chunk and D_ts = e^{g_{s+1} + ... + g_t}, the writes u of a chunk are

    (I + L) u = eta * (V - e^G K S)             L_ts = eta_t D_ts k_t . k_s
    O = scale * (e^G Q S + (D * Q K^T) u)       S <- e^{G_C} S + sum_s D_Cs k_s u_s^T

where L_ts = 0 unless s lies in an earlier mini-batch than t.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deltanet_kernels.arguments import RuleCall
from deltanet_kernels.common.chunk_layout import ChunkLayout
from deltanet_kernels.common.heads import stack_queries, unstack_queries
from deltanet_kernels.common.state_scan import segment_decay, state_scan
from deltanet_kernels.ttt.calls import TTTState

CHUNK = 64


def linear_chunks(
    call: RuleCall, mini_batch: int, before: TTTState, begun: bool, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [B, T, HO, V], and `weight` and `pending` of the new state (pending is 0 unless a final state is wanted).

    Args:
        call: its tensors in the dtype of the state and in the places of their mini-batches, one key head per state.
        before: the state before the first place.
        begun: whether the first mini-batch may have begun before this call.
        ends: [N], the place after the last token of each sequence.
    """
    d, dtype, device = call.dims, before.weight.dtype, call.q.device
    size = mini_batch * max(1, min(CHUNK, d.T) // mini_batch)
    layout = ChunkLayout.of(call.q, size, call.cu_seqlens)
    q, k, v, g, eta = (layout.cut(x) for x in call[:5])
    G, D = g.cumsum(-1).exp(), segment_decay(g)  # [M, HV, C], [M, HV, C, C]
    batch_of = torch.arange(size, device=device) // mini_batch
    wanted = v
    if begun:  # the first mini-batch takes its gradients at S - pending
        first = layout.counts[0]
        more = (G * (batch_of == 0)).unsqueeze(-1)[:first] * (k[:first] @ layout.sort(before.pending))
        wanted = torch.cat([v[:first] + more, v[first:]])
    right = eta.unsqueeze(-1) * torch.cat([wanted, G.unsqueeze(-1) * k], dim=-1)
    if mini_batch < size:
        earlier = batch_of.unsqueeze(1) > batch_of
        system = torch.eye(size, dtype=dtype, device=device) + eta.unsqueeze(-1) * D * earlier * (k @ k.mT)
        right = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    U, W = right.split([d.V, d.K], dim=-1)  # u = U - W S
    write = (D[..., -1, :, None] * k).mT  # [M, HV, K, C]
    transition = G[..., -1, None, None] * torch.eye(d.K, dtype=dtype, device=device) - write @ W
    states, final = state_scan(transition, write @ U, layout.sort(before.weight), layout.counts)
    u = U - W @ states

    rows, repeats = stack_queries(q, d.HV), d.HO // d.HV
    o = G.repeat(1, 1, repeats).unsqueeze(-1) * (rows @ states)
    o = o + ((rows @ k.mT) * D.repeat(1, 1, repeats, 1)) @ u
    o = layout.join(unstack_queries(call.factor * o, size))
    if not call.output_final_state:
        return o, final, torch.zeros_like(final)
    pending = _pending(layout, mini_batch, before, begun, layout.sort(ends), write, u, G)
    return o, layout.unsort(final), layout.unsort(pending)


def _pending(
    layout: ChunkLayout, m: int, before: TTTState, begun: bool, ends: Tensor, write: Tensor, u: Tensor, G: Tensor
) -> Tensor:
    """The writes [N, HV, K, V] of the tokens from the last multiple of m before `ends` on, decayed to the end.

    Empty places write nothing and do not decay, so everything may be read off the chunk in which that multiple lies.
    """
    if m == 1 or not layout.counts:
        return torch.zeros_like(before.pending)
    begin = ends // m * m
    counts = torch.tensor(layout.counts, device=ends.device)
    number = torch.arange(len(ends), device=ends.device)
    last = (number.unsqueeze(1) < counts).sum(1).clamp_min(1) - 1  # chunk number of each sequence's last chunk
    chunk = torch.minimum(begin // layout.size, last)
    row = (counts.cumsum(0) - counts)[chunk] + number
    row = row.clamp_max(len(u) - 1)
    place = chunk.unsqueeze(1) * layout.size + torch.arange(layout.size, device=ends.device)
    own = (place >= begin.unsqueeze(1)) & (place < ends.unsqueeze(1))
    pending = (write[row] * own[:, None, None, :]) @ u[row]
    if begun:
        first = (begin == 0)[:, None, None, None]
        pending = pending + torch.where(first, G[row][..., -1, None, None] * layout.sort(before.pending), 0.0)
    return pending
