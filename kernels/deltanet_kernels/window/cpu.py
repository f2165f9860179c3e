"""Attention over window and sinks in PyTorch, block by block: memory is proportional to T (window + sinks).

A block of C queries sees keys of two parts: the sinks of the sequence that the block begins in, and the window - 1
tokens before it with itself. The sinks of a sequence that begins within the block are among its own tokens. A sink
within the second part is masked in the first.

Without gradients, PyTorch's flash attention for CPUs takes the blocks. It needs no large ones, so they are short: each
query has scores for window - 1 + C keys. It takes one block after the other where it can (`flash_attention`), so that
keys are not copied for each block, and the first blocks have few.
"""

import functools

import torch
from torch.nn import functional as F

from deltanet_kernels.common.sizes import cdiv
from deltanet_kernels.window.calls import WindowCall
from deltanet_kernels.window.masked import attention, by_flash, cpu_flash

BLOCK = 16  # the least number of queries per block with gradients
FLASH_BLOCK = 64  # queries per block of flash attention; 128 take a tenth longer with a window of 545


def block_size(window: int, tokens: int, flash: bool) -> int:
    """C: queries per block. With gradients, blocks of one size, as long as the window at most, hold the tokens."""
    return min(tokens, FLASH_BLOCK) if flash else cdiv(tokens, cdiv(tokens, max(window, BLOCK)))


def torch_window_attention(call: WindowCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`deltanet_kernels.window_attention` in PyTorch, float32 inside (float64 for float64 inputs)."""
    q, k, v, window, sinks, _, cu_seqlens, softcap, edge = call
    dtype = torch.promote_types(q.dtype, torch.float32)
    start = tail = None
    if cu_seqlens is not None:  # the tokens after the last sequence form one more, whose results are dropped
        token = torch.arange(q.shape[1], device=q.device)
        start, tail = _starts(token, cu_seqlens), token >= cu_seqlens[-1]
        q, k, v = (x.masked_fill(tail[:, None, None], 0.0) for x in (q, k, v))  # 0 * NaN is NaN
    q, k, v = (x.to(dtype) for x in (q, k, v))
    o, lse = blocked_attention(q, k, v, window, sinks, call.factor, softcap, start, edge)
    if tail is not None:
        o, lse = o.masked_fill(tail[:, None, None], 0.0), lse.masked_fill(tail[:, None], 0.0)
    return o.to(call.q.dtype), lse


def blocked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int,
    sinks: int,
    scale: float,
    softcap: float | None,
    start: torch.Tensor | None,
    edge: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `torch_window_attention`, of tensors in one dtype.

    Args:
        start: the first token of each token's packed sequence [T]; None for one sequence a row.
        edge: as in `WindowCall`.
    """
    B, T, HQ, D = q.shape
    flash = by_flash(q, k, v, softcap)
    if flash and window >= T and start is None:
        return attention(q, k.transpose(1, 2), v.transpose(1, 2), None, scale, softcap)
    if flash and start is None and not torch.compiler.is_compiling():
        return flash_attention(q, k, v, window, sinks, scale, edge=edge)
    C = block_size(window, T, flash)
    n = cdiv(T, C)
    reach = min(window + edge - 1, T) - 1 if n > 1 else 0  # nothing is before a single block
    token = torch.arange(n * C, device=q.device)
    before = token[::C, None]  # the first token of each block [n, 1]
    start = torch.zeros_like(token) if start is None else F.pad(start, (0, n * C - T))
    first = token[: min(sinks, T)]
    sink = (start[before] + first).clamp(max=T - 1)  # [n, sinks]
    q = _padded(q, 0, n * C).unflatten(1, (n, C))
    # Of each block [B, n, HK, S, D]: the sinks, and its tokens with those before them.
    parts = [[x[:, sink].transpose(2, 3), _padded(x, reach, reach + n * C).unfold(1, reach + C, C).mT] for x in (k, v)]

    at = torch.cat([sink, before + torch.arange(-reach, C, device=q.device)], dim=1)[:, None]
    query = token.view(n, C, 1)
    once = (torch.arange(at.shape[-1], device=q.device) >= first.numel()) | (at < before[:, None] - reach)
    seen = _seen(at, query, start[query], window, sinks, edge) & once
    keys, values = (torch.cat(part, dim=3).flatten(0, 1) for part in parts)
    o, lse = attention(
        q.flatten(0, 1), keys, values, seen.expand(B, -1, -1, -1).flatten(0, 1).unsqueeze(1), scale, softcap
    )
    return o.reshape(B, n * C, HQ, D)[:, :T], lse.reshape(B, n * C, HQ)[:, :T]


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int,
    sinks: int,
    scale: float,
    own: tuple[torch.Tensor, torch.Tensor, int] | None = None,
    edge: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`blocked_attention` of one sequence a row, where flash attention serves; its loop should not be traced.

    The keys of a block lie one after the other in `held`: sinks before its window, the tokens before its last group,
    and its own tokens in their own form. The next block's are put over the first and the last of them.

    Args:
        own: keys and values that take the place of k and v within a query's own group of so many tokens, which divide
            FLASH_BLOCK; k and v may end before the last group.
        edge: as in `WindowCall`.
    """
    T, (*own_form, group) = q.shape[1], own or (k, v, FLASH_BLOCK)
    held = [x.new_empty(len(x), T + FLASH_BLOCK, *x.shape[2:]) for x in (k, v)]
    blocks, far, mask_of = [], 0, functools.lru_cache(1)(_block_mask)  # most blocks have the same
    for begin in range(0, T, FLASH_BLOCK):
        size, low = min(FLASH_BLOCK, T - begin), max(0, begin + 1 - window)
        first, done, far = min(sinks, low), far, (begin + size - 1) // group * group
        for x, other, y in zip(held, (k, v), own_form, strict=True):
            x[:, done:far] = other[:, done:far]
            x[:, far : far + size] = y[:, begin : begin + size]
            x[:, low - first : low] = other[:, :first]
        keys, values = (x[:, low - first : far + size].transpose(1, 2) for x in held)
        mask = mask_of(first, begin - low, size, window, sinks - first, group, edge, q.dtype)
        blocks.append(cpu_flash(q[:, begin : begin + size], keys, values, mask, scale))
    o, lse = (torch.cat(x, dim=1) for x in zip(*blocks, strict=True))
    return o, lse


def _block_mask(
    first: int, reach: int, size: int, window: int, sinks: int, group: int, edge: int, dtype: torch.dtype
) -> torch.Tensor:
    """0 where a query of `flash_attention` sees a key, else -inf: `first` sinks, and tokens from `reach` before the
    block on, of which the first may be further `sinks`."""
    query = torch.arange(size, device="cpu")[:, None]
    far = torch.arange(-reach, (size - 1) // group * group, device="cpu")
    at, is_own = torch.cat([far, query[:, 0]]), torch.arange(len(far) + size, device="cpu") >= len(far)
    in_reach = (query // edge * edge - at < window) | (at < sinks - reach)
    seen = ((at >= query // group * group) == is_own) & (at <= query) & in_reach
    return torch.zeros((), dtype=dtype, device="cpu").where(F.pad(seen, (first, 0), value=True), -torch.inf)


def _seen(
    at: torch.Tensor, query: torch.Tensor, start: torch.Tensor, window: int, sinks: int, edge: int
) -> torch.Tensor:
    """Whether the token `query` of a sequence that begins at `start` sees the one at `at`."""
    first = start + (query - start) // edge * edge
    return (at >= start) & (at <= query) & ((first - at < window) | (at - start < sinks))


def _starts(token: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """The first token of each token's packed sequence."""
    offsets = cu_seqlens.to(token)
    return offsets[torch.searchsorted(offsets[1:].contiguous(), token, right=True)]


def _padded(x: torch.Tensor, before: int, length: int) -> torch.Tensor:
    """x [B, T, H, D] behind `before` tokens of zeros and filled up with zeros to `length`."""
    return F.pad(x, (0, 0, 0, 0, before, length - before - x.shape[1]))
