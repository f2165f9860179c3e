"""Attention that sees recent tokens, and older ones as far as their gates keep them, as a cache of 4 bits holds them.

The keys stand three times in a row: in 8 bits, for the query's own group of 32 tokens; in 4 (of the sinks in 8), for
the other tokens of the window and the sinks; in 4 and with the logarithm of the gate as one more channel, which queries
multiply by 1, for what is older. Every pair of query and token has one place among the three. So a gate has its
gradient by a product of matrices, and the mask holds no numbers that are trained. Tokens share scales with their
neighbours in the text, not with those that are kept beside them.

Shapes: B batch, T tokens, HQ and HK query and key/value heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from deltanet_hf.mixers.cache.quantised_cache_spec import QuantisedCacheSpec
from deltanet_hf.mixers.cache.quantised_kv_cache import quantised_prompt, straight_through
from deltanet_kernels.packed_cache.layout import GROUP, SINKS

EVICTED = -1e4  # log gate of a token that is not kept; its weight is 0 in any dtype
LENGTHS = 1024  # on a GPU, rows are padded to a multiple of so many tokens: a kernel is compiled for each length

Sees = Callable[[Any, Any, Any, Any], Tensor]


@dataclass
class Reach:
    """The tokens that the heads of a layer see.

    Attributes:
        windows: tokens that a query sees in any case, itself included [HK] int64.
        gated: whether older tokens are seen as far as their gates are open [HK] bool; else they are not.
    """

    windows: Tensor
    gated: Tensor
    masks: dict[int, Any] = field(default_factory=dict)  # by length

    def sees(self, length: int, groups: int) -> Sees:
        """The function (batch, query head, query, place) -> bool of three times `length` places.

        Args:
            groups: query heads per key/value head.
        """
        windows, gated = (x.repeat_interleave(groups) for x in (self.windows, self.gated))

        def sees(b: Any, h: Any, query: Any, place: Any) -> Tensor:
            part, token = place // length, place % length
            near = (query - token < windows[h]) | (token < SINKS)
            own = query // GROUP == token // GROUP
            seen: Tensor = (part == 0) & near & own | (part == 1) & near & ~own | (part == 2) & ~near & gated[h]
            return seen & (token <= query)

        return sees


def evicting_attention(q: Tensor, k: Tensor, v: Tensor, log_gates: Tensor, reach: Reach, scale: float) -> Tensor:
    """Softmax attention with gates.

    Args:
        q: [B, HQ, T, D]; k, v: [B, HK, T, D].
        log_gates: logarithm of the share to which an older token is kept [B, HK, T] float32, at most 0.
        scale: factor of the scores.

    Returns:
        [B, HQ, T, D].
    """
    tokens = q.shape[2]
    pad = -tokens % (LENGTHS if q.is_cuda else GROUP)
    q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
    bias = (F.pad(log_gates, (0, pad)) / scale).to(k.dtype).unsqueeze(-1)
    k, v, k4, v4 = packed(k, v)
    zero = torch.zeros_like(bias)
    keys = torch.cat([torch.cat(pair, -1) for pair in ((k, zero), (k4, zero), (k4, bias))], dim=2)
    values = torch.cat([v, v4, v4], dim=2)
    queries = F.pad(q, (0, 1), value=1.0)
    attend = by_blocks if q.is_cuda else by_mask  # on a CPU, flex_attention has no gradients
    return attend(queries, keys, values, reach, scale)[:, :, :tokens]


def by_blocks(queries: Tensor, keys: Tensor, values: Tensor, reach: Reach, scale: float) -> Tensor:
    """Attention by `flex_attention`, which leaves out blocks of tokens that no query sees."""
    heads, length = queries.shape[1:3]
    if length not in reach.masks:
        sees = reach.sees(length, heads // keys.shape[1])
        reach.masks[length] = compiled(create_block_mask)(sees, None, heads, length, 3 * length, device=queries.device)
    room = 2 * values.shape[-1] - queries.shape[-1]  # up to a power of two
    queries, keys = F.pad(queries, (0, room)), F.pad(keys, (0, room))
    output: Tensor = compiled(flex_attention)(
        queries, keys, values, block_mask=reach.masks[length], scale=scale, enable_gqa=True
    )
    return output


def by_mask(queries: Tensor, keys: Tensor, values: Tensor, reach: Reach, scale: float) -> Tensor:
    """Attention by SDPA with a mask of all pairs."""
    count, length = queries.shape[1:3]
    place = torch.arange(3 * length, device=queries.device)
    heads = torch.arange(count, device=queries.device)[:, None, None]
    seen = reach.sees(length, count // keys.shape[1])(None, heads, place[:length, None], place)
    return F.scaled_dot_product_attention(queries, keys, values, seen, scale=scale, enable_gqa=True)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under torch.compile, which takes seconds to import."""
    return torch.compile(function)


def packed(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values [B, HK, T, D] in 8 and in 4 bits, as a packed cache has them; gradients pass unchanged.

    The last group is in 8 bits in both: no later token sees it.
    """
    k, v = (x.transpose(1, 2).contiguous() for x in (k, v))
    k, v, seen, _ = quantised_prompt(QuantisedCacheSpec(4, None), k, v, keep_state=False)
    fewer = (straight_through(x, restored) for x, restored in zip((k, v), seen, strict=True))
    k, v, k4, v4 = (x.transpose(1, 2) for x in (k, v, *fewer))
    return k, v, k4, v4
