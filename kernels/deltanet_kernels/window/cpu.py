"""Attention over window and sinks in PyTorch, block by block: memory is proportional to T (window + sinks).

A block of C >= window - 1 queries sees keys of three parts: the sinks of the sequence that the block begins in, the
block before it, and itself. The sinks of a sequence that begins within the block are among its own tokens. A sink
within the last two parts is masked in the first.
"""

import torch
from torch.nn import functional as F

from deltanet_kernels.arguments import WindowCall
from deltanet_kernels.common.sizes import cdiv

BLOCK = 16  # the least number of queries per block


def block_size(window: int, tokens: int) -> int:
    """C: queries per block, each of which has scores for the sinks and the 2 C keys that end with its block."""
    return min(tokens, max(window - 1, BLOCK))


def torch_window_attention(call: WindowCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`deltanet_kernels.window_attention` in PyTorch, float32 inside (float64 for float64 inputs)."""
    q, k, v, window, sinks, _, cu_seqlens, softcap = call
    (B, T, HQ, D), HK = q.shape, k.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    token = torch.arange(T, device=q.device)
    # The tokens after the last packed sequence form one sequence more, whose results are dropped.
    start = torch.zeros_like(token) if cu_seqlens is None else _starts(token, cu_seqlens)
    tail = None if cu_seqlens is None else token >= cu_seqlens[-1]
    if tail is not None:  # 0 * NaN is NaN
        q, k, v = (x.masked_fill(tail[:, None, None], 0.0) for x in (q, k, v))

    C = block_size(window, T)
    n = cdiv(T, C)
    before = C * torch.arange(n, device=q.device)[:, None]  # the first token of each block [n, 1]
    first = torch.arange(min(sinks, T), device=q.device)
    sink = (start[before] + first).clamp(max=T - 1)  # [n, sinks]
    q, k, v = (F.pad(x.to(dtype), (0, 0, 0, 0, 0, n * C - T)).unflatten(1, (n, C)) for x in (q, k, v))
    keys, values = (_gather(x, sink).permute(0, 1, 3, 2, 4) for x in (k, v))  # [B, n, HK, sinks + 2C, D]

    at = torch.cat([sink, before + torch.arange(-C, C, device=q.device)], dim=1)[:, None]
    query = (before + torch.arange(C, device=q.device))[:, :, None]
    start = F.pad(start, (0, n * C - T))[query]
    once = (torch.arange(at.shape[-1], device=q.device) >= first.numel()) | (at < before[:, None] - C)
    seen = (at >= start) & (at <= query) & ((query - at < window) | (at - start < sinks)) & once  # [n, C, sinks + 2C]

    q = q.unflatten(3, (HK, HQ // HK)).permute(0, 1, 3, 4, 2, 5)  # [B, n, HK, G, C, D]
    scores = (q.flatten(3, 4) @ keys.transpose(-1, -2)).view(*q.shape[:-1], at.shape[-1])
    scores = scores * call.factor
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse.unsqueeze(-1)).exp()
    o = (weights.flatten(3, 4) @ values).view(q.shape).permute(0, 1, 4, 2, 3, 5).reshape(B, n * C, HQ, D)[:, :T]
    lse = lse.permute(0, 1, 4, 2, 3).reshape(B, n * C, HQ)[:, :T]
    if tail is not None:
        o, lse = o.masked_fill(tail[:, None, None], 0.0), lse.masked_fill(tail[:, None], 0.0)
    return o.to(call.q.dtype), lse


def _starts(token: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """The first token of each token's packed sequence."""
    offsets = cu_seqlens.to(token)
    return offsets[torch.searchsorted(offsets[1:].contiguous(), token, right=True)]


def _gather(x: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """The keys of each block [B, n, sinks + 2C, HK, D] from x [B, n, C, HK, D]: sinks, the block before, the block."""
    before = F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1]
    return torch.cat([x.flatten(1, 2)[:, sink], before, x], dim=2)
