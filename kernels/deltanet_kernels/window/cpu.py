"""Attention over window and sinks in PyTorch, block by block: memory is proportional to T (window + sinks).

A block of C >= window - 1 queries sees keys of three parts: the sinks of the sequence that the block begins in, the
block before it, and itself. The sinks of a sequence that begins within the block are among its own tokens. A sink
within the last two parts is masked in the first.

Without gradients, PyTorch's flash attention for CPUs takes the blocks, or all tokens of a short call at once.
"""

import torch
from torch.nn import functional as F

from deltanet_kernels.common.sizes import cdiv
from deltanet_kernels.window.calls import WindowCall

AT_ONCE = 3  # up to so many windows of tokens, flash attention computes all pairs sooner than blocks
BLOCK = 16  # the least number of queries per block


def block_size(window: int, tokens: int) -> int:
    """C: queries per block, each of which has scores for the sinks and the 2 C keys that end with its block."""
    return min(tokens, max(window - 1, BLOCK))


def torch_window_attention(call: WindowCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`deltanet_kernels.window_attention` in PyTorch, float32 inside (float64 for float64 inputs)."""
    q, k, v, window, sinks, _, cu_seqlens, softcap = call
    B, T, HQ, D = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    token = torch.arange(T, device=q.device)
    # The tokens after the last packed sequence form one sequence more, whose results are dropped.
    start = torch.zeros_like(token) if cu_seqlens is None else _starts(token, cu_seqlens)
    tail = None if cu_seqlens is None else token >= cu_seqlens[-1]
    if tail is not None:  # 0 * NaN is NaN
        q, k, v = (x.masked_fill(tail[:, None, None], 0.0) for x in (q, k, v))
    q, k, v = (x.to(dtype) for x in (q, k, v))
    if AT_ONCE * window + sinks >= T and _by_flash(q, k, v, softcap):
        seen = _seen(token, token[:, None], start[:, None], window, sinks)[None, None]
        o, lse = attention(q, k.transpose(1, 2), v.transpose(1, 2), seen, call.factor, softcap)
    else:
        C = block_size(window, T)
        n = cdiv(T, C)
        before = C * torch.arange(n, device=q.device)[:, None]  # the first token of each block [n, 1]
        first = torch.arange(min(sinks, T), device=q.device)
        sink = (start[before] + first).clamp(max=T - 1)  # [n, sinks]
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, n * C - T)).unflatten(1, (n, C)) for x in (q, k, v))
        keys, values = (_gather(x, sink).permute(0, 1, 3, 2, 4) for x in (k, v))  # [B, n, HK, sinks + 2C, D]

        at = torch.cat([sink, before + torch.arange(-C, C, device=q.device)], dim=1)[:, None]
        query = (before + torch.arange(C, device=q.device))[:, :, None]
        start = F.pad(start, (0, n * C - T))[query]
        once = (torch.arange(at.shape[-1], device=q.device) >= first.numel()) | (at < before[:, None] - C)
        seen = (_seen(at, query, start, window, sinks) & once).expand(B, n, C, -1)
        q, keys, values = (x.flatten(0, 1) for x in (q, keys, values))
        o, lse = attention(q, keys, values, seen.flatten(0, 1).unsqueeze(1), call.factor, softcap)
        o, lse = o.reshape(B, n * C, HQ, D)[:, :T], lse.reshape(B, n * C, HQ)[:, :T]
    if tail is not None:
        o, lse = o.masked_fill(tail[:, None, None], 0.0), lse.masked_fill(tail[:, None], 0.0)
    return o.to(call.q.dtype), lse


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention and its sums, in one dtype.

    On CPUs by PyTorch's flash attention where it can: `scaled_dot_product_attention` keeps the sums to itself.

    Args:
        q: [B, T, HQ, D].
        keys, values: [B, HK, S, D].
        seen: whether a query sees a key, [B or 1, 1, T, S].

    Returns:
        o [B, T, HQ, D] and lse [B, T, HQ].
    """
    if _by_flash(q, keys, values, softcap):
        mask = torch.where(seen, 0.0, -torch.inf).to(q.dtype)
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.transpose(1, 2), keys, values, attn_mask=mask, scale=scale
        )
        return o.transpose(1, 2), lse.transpose(1, 2)
    q = q.unflatten(2, (keys.shape[1], -1)).permute(0, 2, 3, 1, 4)  # [B, HK, G, T, D]
    scores = (q.flatten(2, 3) @ keys.transpose(-1, -2)).view(*q.shape[:-1], -1) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen.unsqueeze(2), -torch.inf)
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse.unsqueeze(-1)).exp()
    o = (weights.flatten(2, 3) @ values).view(q.shape).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return o, lse.permute(0, 3, 1, 2).flatten(2, 3)


def _by_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softcap: float | None) -> bool:
    """Whether PyTorch's flash attention serves a call: on a CPU, without capped scores and without gradients."""
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return q.device.type == "cpu" and softcap is None and not gradients and q.numel() > 0


def _seen(at: torch.Tensor, query: torch.Tensor, start: torch.Tensor, window: int, sinks: int) -> torch.Tensor:
    """Whether the token `query` of a sequence that begins at `start` sees the one at `at`."""
    return (at >= start) & (at <= query) & ((query - at < window) | (at - start < sinks))


def _starts(token: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """The first token of each token's packed sequence."""
    offsets = cu_seqlens.to(token)
    return offsets[torch.searchsorted(offsets[1:].contiguous(), token, right=True)]


def _gather(x: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """The keys of each block [B, n, sinks + 2C, HK, D] from x [B, n, C, HK, D]: sinks, the block before, the block."""
    before = F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1]
    return torch.cat([x.flatten(1, 2)[:, sink], before, x], dim=2)
