"""The delta rule with a decay per key channel in chunks, in plain PyTorch: any device, differentiable by autograd.

Within a chunk of C tokens, with G [C, K] the inclusive sum of g over the chunk,

    P_ij = scale sum_c q_ic k_jc e^{G_ic - G_jc}  (i >= j)        L_ij = beta_i sum_c p_ic k_jc e^{G_ic - G_jc}  (i > j)
    (I + L) V' = beta V - (beta p e^G) S                          (without erasing: V' = beta V)
    O = (scale q e^G) S + P V'                                    S <- Diag(e^{G_C}) S + (k e^{G_C - G})^T V'

e^{G_i - G_j} does not factor into e^{G_i} e^{-G_j}, whose second half overflows. P and L are computed by halves
instead: the pairs of an upper and a lower half of 64, then of 32, ..., then of 2 tokens are one product per half,
relative to the first token of the upper half. Both factors are then at most 1, however strong the decay. The exponents
are sums of g from one side, never differences of sums, so a strong gate leaves the digits of its neighbours alone.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from deltanet_kernels.channel_gates.calls import ChannelCall
from deltanet_kernels.common.heads import l2_normalize

CHUNK = 64
MAX_STEPS = 8  # up to this many tokens the recurrence is faster than one chunk


def chunked(call: ChannelCall) -> tuple[Tensor, Tensor | None]:
    """`deltanet_kernels.chunk_channel_gated_delta_rule` for checked arguments; float32, or float64 for float64 inputs.

    With `cu_seqlens` the sequences run one after the other.
    """
    with torch.autocast(call.q.device.type, enabled=False):
        q, k, v, g, beta, p = _prepared(call)
        state = _first_state(call)
        if call.cu_seqlens is None:
            o, last = _sequence(q, k, v, g, beta, p, state)
        else:
            offsets = call.cu_seqlens.tolist()
            outputs, states = [], []
            for n, (start, end) in enumerate(pairwise(offsets)):
                first = state[n : n + 1]
                if end > start:
                    part = slice(start, end)
                    erases = None if p is None else p[:, part]
                    o, first = _sequence(q[:, part], k[:, part], v[:, part], g[:, part], beta[:, part], erases, first)
                    outputs.append(o)
                states.append(first)
            outputs.append(v.new_zeros(1, v.shape[1] - offsets[-1], q.shape[2] * q.shape[3], v.shape[3]))
            o, last = torch.cat(outputs, dim=1), torch.cat(states)
    return o.to(call.v.dtype), last if call.output_final_state else None


def recurrent(call: ChannelCall) -> tuple[Tensor, Tensor | None]:
    """`deltanet_kernels.fused_recurrent_channel_gated_delta_rule` for checked arguments.

    Long or packed inputs and calls that need gradients use the chunked form.
    """
    if call.needs_gradients() or call.cu_seqlens is not None or call.q.shape[1] > MAX_STEPS:
        return chunked(call)
    with torch.autocast(call.q.device.type, enabled=False):
        q, k, v, g, beta, p = _prepared(call)
        state, decay, outputs = _first_state(call), g.exp().unsqueeze(-1), []
        for t in range(q.shape[1]):
            state = state * decay[:, t]
            wanted = v[:, t].unsqueeze(-2)  # [B, HV, 1, V]
            if p is not None:
                wanted = wanted - p[:, t].unsqueeze(-2) @ state
            state = torch.addcmul(state, k[:, t].unsqueeze(-1), beta[:, t, :, None, None] * wanted)
            outputs.append((q[:, t] @ state).flatten(1, 2))  # [B, HO, V]
        return torch.stack(outputs, dim=1).to(call.v.dtype), state if call.output_final_state else None


def _prepared(call: ChannelCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """q [B, T, HV, R, K] with the factor of the output, the R queries of a state together; the rest [B, T, HV, ...]."""
    dims, dtype = call.dims, torch.promote_types(call.q.dtype, torch.float32)
    q, k, v, g, beta = (x.to(dtype) for x in call[:5])
    if call.use_qk_l2norm_in_kernel:
        q, k = l2_normalize(q), l2_normalize(k)
    k = k.repeat_interleave(dims.HV // dims.H, dim=2)
    q = q.repeat_interleave(dims.HO // dims.HQ, dim=2).unflatten(2, (dims.HV, -1)) * call.factor
    p = None
    if call.erase:
        p = k if call.erase_key is None else call.erase_key.to(dtype)
    return q, k, v, g, beta, p


def _first_state(call: ChannelCall) -> Tensor:
    if call.initial_state is not None:
        return call.initial_state
    dims, dtype = call.dims, torch.promote_types(call.q.dtype, torch.float32)
    return torch.zeros(dims.N, dims.HV, dims.K, dims.V, dtype=dtype, device=call.q.device)


def _sequence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, p: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [B, T, HO, V] and final state [B, HV, K, V] of rows of equal length."""
    length = q.shape[1]
    C = CHUNK if length > CHUNK else 1 << (length - 1).bit_length()
    chunks = -(-length // C)

    def cut(x: Tensor) -> Tensor:
        """[B, T, HV, ...] -> [chunks, B, HV, C, ...]; tokens past the end are zeros, which change nothing."""
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, chunks * C - length))
        return x.unflatten(1, (chunks, C)).transpose(0, 1).movedim(3, 2)

    q, k, v, g, beta = cut(q).movedim(4, 3), cut(k), cut(v), cut(g), cut(beta.unsqueeze(-1))
    since, until, whole = _sums(g)
    scores = pairs(q, k.unsqueeze(3), g.unsqueeze(3)) + torch.diag_embed((q * k.unsqueeze(3)).sum(-1))
    reads = q * since.exp().unsqueeze(3)  # [chunks, B, HV, R, C, K]
    writes = (k * until.exp()).mT
    fade = whole.exp().mT
    values = beta * v
    if p is not None:
        p = cut(p) * beta
        unit = torch.eye(C, dtype=v.dtype, device=v.device)
        # One triangular system for all chunks: (I + L)^-1 times what is known, and times what the state multiplies.
        known = torch.cat([values, p * since.exp()], dim=-1)
        known = torch.linalg.solve_triangular(unit + pairs(p, k, g), known, upper=False, unitriangular=True)
        values, erases = known.split([v.shape[-1], k.shape[-1]], dim=-1)
    states, written = [state], []
    for chunk in range(chunks):
        new = values[chunk]
        if p is not None:
            new = new - erases[chunk] @ states[-1]
        written.append(new)
        states.append(fade[chunk] * states[-1] + writes[chunk] @ new)
    o = reads @ torch.stack(states[:-1]).unsqueeze(3) + scores @ torch.stack(written).unsqueeze(3)
    o = o.permute(1, 0, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)[:, :length]  # [B, T, HV, R, V] at first
    return o, states[-1]


def _sums(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of g [..., C, K] up to and including each token, over the tokens after it, and over all [..., 1, K]."""
    after = F.pad(g[..., 1:, :], (0, 0, 0, 1))
    return g.cumsum(-2), after.flip(-2).cumsum(-2).flip(-2), g.sum(-2, keepdim=True)


def pairs(x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    """sum_c x_ic y_jc e^{G_ic - G_jc} for i > j, else 0: [..., C, C] from x, y, g [..., C, K], C a power of two.

    The shapes before the last two have to broadcast.
    """
    C = x.shape[-2]
    if C == 1:
        return x.new_zeros(*torch.broadcast_shapes(x.shape, y.shape)[:-1], 1)
    upper, lower = (slice(C // 2, C), slice(0, C // 2))
    first = g[..., upper, :][..., :1, :]
    # From the first token of the upper half (itself not counted) to i, and from j to that token.
    since = F.pad(g[..., upper, :][..., 1:, :], (0, 0, 1, 0)).cumsum(-2)
    until = torch.cat([g[..., lower, :][..., 1:, :], first], dim=-2).flip(-2).cumsum(-2).flip(-2)
    across = (x[..., upper, :] * since.exp()) @ (y[..., lower, :] * until.exp()).mT
    # Both halves by themselves, as one call.
    x, y, g = (torch.stack([z[..., lower, :], z[..., upper, :]]) for z in (x, y, g))
    low, high = pairs(x, y, g)
    above = torch.zeros_like(across)
    return torch.cat([torch.cat([low, above], dim=-1), torch.cat([across, high], dim=-1)], dim=-2)
