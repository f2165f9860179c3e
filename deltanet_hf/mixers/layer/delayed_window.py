"""The window beside a delayed state, in one call: its attention, and the keys and values that leave it.

A call is computed in one of three ways:

    rows      whole sequences without padding, or packed into one row   the kernels of a prompt
    a step    one further token per sequence, without padding           `packed_step_` in 4 and 8 bits
    others    several further tokens, or padding                        tokens laid out by their numbers

Shapes: B batch, T tokens of the call, HQ and HK query and key/value heads, D head size, N groups before a query's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from deltanet_hf.mixers.cache.quantised_cache_spec import PACKED_ROWS
from deltanet_hf.mixers.cache.quantised_kv_cache import QuantisedKVCache, quantised_prompt, straight_through
from deltanet_hf.mixers.cache.sinks_apart import with_learned_sinks
from deltanet_hf.mixers.cache.state import State
from deltanet_hf.mixers.cache.window_cache import SinkCache, Tokens
from deltanet_hf.mixers.layer.layer_call import LayerCall
from deltanet_hf.mixers.layer.layer_kind import PositionEmbeddings
from deltanet_hf.mixers.layer.token_order import placed
from deltanet_kernels import round_tokens
from deltanet_kernels.common.registration import is_observed
from deltanet_kernels.packed_cache.arranged import ArrangedTokens
from deltanet_kernels.packed_cache.calls import RoundTokensCall
from deltanet_kernels.packed_cache.layout import unpacked
from deltanet_kernels.window.masked import attention

if TYPE_CHECKING:
    from deltanet_hf.mixers.layer.window_branch import WindowBranch


class Leaving(NamedTuple):
    """The window's part of a call, and what the state may get of it.

    Keys and values are as the cache keeps them, in the order of the tokens' numbers, the first L from the token
    32 `base` on; `base` None stands for whole rows, with L = T.
    """

    window_output: Tensor  # [B, T, HQ, D]: the attention
    lse: Tensor  # [B, T, HQ] float32: its log-sum-exp
    keys: Tensor | None  # [B, L, HK, D]; None where the host knows that nothing leaves
    values: Tensor | None
    base: Tensor | None  # [B] int64: the group of the first token that is not in the state
    state: State  # the window's part of the new state; empty unless it is kept


class Further(NamedTuple):
    """A call behind the tokens of a cache, or with padding."""

    q: Tensor
    k: Tensor
    v: Tensor
    tokens: Tokens  # the queries
    padding: Tensor | None  # [B, T]
    turn: PositionEmbeddings | None
    own: State  # the window's part of the state before the call
    base: Tensor  # as in `Leaving`


def leaving(
    branch: WindowBranch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: LayerCall,
    tokens: Tokens,
    turn: PositionEmbeddings | None,
) -> Leaving:
    """The window of a call, of q [B, T, HQ, D] and k, v [B, T, HK, D] as softmax attention sees them.

    With `turn`, sinks outside of the window are seen as `WindowBranch.with_sinks` says.
    """
    if call.state is None and call.padding is None:
        return _rows(branch, q, k, v, call, tokens, turn)
    own = {} if call.state is None else {name: call.state[name] for name in branch.state_names}
    count = own["count"].long() if own else q.new_zeros(len(q), dtype=torch.long)
    base = ((count - 1).clamp_min(0) // branch.edge - branch.groups).clamp_min(0)
    one = q.shape[1] == 1 and own and call.padding is None and branch.groups > 0
    forms = (_packed_step, _packed_part) if branch.cache_bits < 16 else (_step, _part)
    return forms[0 if one else 1](branch, Further(q, k, v, tokens, call.padding, turn, own, base))


def _rows(
    branch: WindowBranch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: LayerCall,
    tokens: Tokens,
    turn: PositionEmbeddings | None,
) -> Leaving:
    if branch.cache_bits == 16:
        window_output, lse = branch.attend(q, k, v, call.cu_seqlens, turn)
        state: State = {}
        if call.keep_state:
            own = tokens if call.prompt_length is None else tokens.until(call.prompt_length)
            sink_cache = SinkCache(branch.places, branch.sinks, {}, own, cu_seqlens=call.cu_seqlens)
            sink_cache.update(k.transpose(1, 2), v.transpose(1, 2), 0)
            state = sink_cache.state
        return Leaving(window_output, lse, k, v, None, state)
    if call.cu_seqlens is not None and call.lengths is None:
        raise ValueError(PACKED_ROWS)
    row = call.cu_seqlens, call.longest
    k, v, seen, state = quantised_prompt(branch.cache_spec, k, v, call.keep_state, call.prompt_length, *row)
    window_output, lse = branch.attend_rounded(q, k, v, seen, turn, *row)
    keys, values = (straight_through(x, other) for x, other in zip((k, v), seen, strict=True))
    return Leaving(window_output, lse, keys, values, None, state)


def _packed_part(branch: WindowBranch, call: Further) -> Leaving:
    q, k, v, tokens, padding, turn, own, base = call
    packed = QuantisedKVCache(branch.cache_spec, own, padding, turn=turn)
    old = packed.cache_before(k)
    window_output, lse = packed.attend(q, k, v, branch.scale, branch.softcap)
    k, v = round_tokens.unchecked(RoundTokensCall(k, v))
    arranged = ArrangedTokens.of(k, v, tokens.numbers.long().expand(len(q), -1) - 1, old)
    keys, values = (x.transpose(1, 2) for x in unpacked(arranged.packed, k.dtype, old.key_order))
    return Leaving(*with_learned_sinks(window_output, lse, branch.learned_sinks), keys, values, base, packed.state)


def _packed_step(branch: WindowBranch, call: Further) -> Leaving:
    q, k, v, _, _, turn, own, base = call
    packed, keys, values = QuantisedKVCache(branch.cache_spec, own, None, turn=turn), None, None
    if not _nothing_leaves(branch, own["count"]):
        leaves = packed.cache_before(k).group(base % branch.groups, k.dtype)  # before the step packs another over it
        keys, values = (_and_another(x.transpose(1, 2)) for x in leaves)
    window_output, lse = with_learned_sinks(*packed.attend(q, k, v, branch.scale, branch.softcap), branch.learned_sinks)
    return Leaving(window_output, lse, keys, values, base, packed.state)


def _part(branch: WindowBranch, call: Further) -> Leaving:
    q, k, v, tokens, _, turn, own, base = call
    sink_cache = SinkCache(branch.places, branch.sinks, own, tokens)
    keys, values = sink_cache.update(k.transpose(1, 2), v.transpose(1, 2), 0)
    window_output, lse = _attend(branch, q, keys, values, tokens, sink_cache, turn)
    length = branch.places + -(-q.shape[1] // branch.edge) * branch.edge
    first = (base * branch.edge)[:, None]
    numbers = sink_cache.seen.numbers.long().expand(len(q), -1)
    at = (numbers - 1 - first).where((numbers > 0) & (numbers > first), length)
    left_keys, left_values = (placed(x.transpose(1, 2), at, length) for x in (keys, values))
    return Leaving(window_output, lse, left_keys, left_values, base, sink_cache.state)


def _step(branch: WindowBranch, call: Further) -> Leaving:
    q, k, v, tokens, _, turn, own, base = call
    left_keys = left_values = None
    if not _nothing_leaves(branch, own["count"]):
        number = (base * branch.edge)[:, None] + torch.arange(branch.edge, device=q.device)
        place = branch.sinks + (number + 1) % branch.places  # sinks have others, and are never written
        left_keys, left_values = (
            _and_another(own[name].gather(2, _index(place, own[name])).transpose(1, 2)) for name in ("keys", "values")
        )
    sink_cache = SinkCache(branch.places, branch.sinks, own, tokens)
    keys, values = sink_cache.update(k.transpose(1, 2), v.transpose(1, 2), 0)
    window_output, lse = _attend(branch, q, keys, values, tokens, sink_cache, turn)
    return Leaving(window_output, lse, left_keys, left_values, base, sink_cache.state)


def _attend(
    branch: WindowBranch,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tokens: Tokens,
    held: SinkCache,
    turn: PositionEmbeddings | None,
) -> tuple[Tensor, Tensor]:
    """Attention of q [B, T, HQ, D] to keys and values [B, HK, S, D], which `held` has taken."""
    mask = tokens.sees(held.seen, branch.window, branch.sinks if turn is None else 0, None, branch.edge).unsqueeze(1)
    window_output, lse = attention(q.float(), keys.float(), values.float(), mask, branch.scale, branch.softcap)
    if turn is not None:
        k, v = (held.state[name].transpose(1, 2) for name in ("keys", "values"))
        window_output, lse = branch.with_sinks(window_output, lse, q, k, v, tokens.numbers, turn)
    return with_learned_sinks(window_output.to(values.dtype), lse, branch.learned_sinks)


def _nothing_leaves(branch: WindowBranch, count: Tensor) -> bool:
    """Whether the host knows that no group leaves the windows of sequences of these lengths [B] with the next token."""
    if count.is_cuda or is_observed():
        return False
    return not any(n % branch.edge == 0 and n >= branch.places for n in count.tolist())


def _index(place: Tensor, x: Tensor) -> Tensor:
    """Indices that take the places [B, M] of x [B, H, S, ...]."""
    index = place.view(len(place), 1, -1, *[1] * (x.dim() - 3))
    return index.expand(-1, x.shape[1], -1, *x.shape[3:])


def _and_another(x: Tensor) -> Tensor:
    """x [B, 32, HK, D] and a group of zeros behind it."""
    return torch.cat([x, torch.zeros_like(x)], dim=1)
