"""Which tokens a window with sinks sees, and its cache of constant size.

Shapes: B batch, T tokens of a call, S = window + sinks places of the cache, HK key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltanet_hf.mixers.cache.state import State, TensorShape


@dataclass(frozen=True)
class Tokens:
    """Where tokens stand in their sequences: [B, T] or [1, T] for all rows alike."""

    numbers: Tensor  # 1, 2, 3, ... in each sequence; 0 for padding and empty places
    sequences: Tensor | None  # the sequence of each token in rows that pack several

    @classmethod
    def of(
        cls,
        batch: int,
        length: int,
        padding: Tensor | None,
        cu_seqlens: Tensor | None,
        count: Tensor | None,
        device: torch.device,
    ) -> Tokens:
        """The tokens of a call, `count` [B] tokens into their sequences."""
        if cu_seqlens is not None:
            places = torch.arange(batch * length, device=device)
            starts = cu_seqlens.to(places)
            sequences = torch.searchsorted(starts, places, right=True) - 1
            numbers = places - starts[sequences] + 1
            return cls(numbers.view(batch, length).int(), sequences.view(batch, length))
        numbers = torch.arange(1, length + 1, device=device)[None] if padding is None else (~padding).cumsum(-1)
        if count is not None:
            numbers = numbers + count[:, None]
        if padding is not None:
            numbers = numbers.masked_fill(padding, 0)
        return cls(numbers.int(), None)

    def until(self, length: Tensor) -> Tokens:
        """The first `length` [1] tokens of each sequence; those after them become padding."""
        return Tokens(self.numbers.masked_fill(self.numbers > length, 0), self.sequences)

    def sees(self, keys: Tokens, window: int, sinks: int, family_window: int | None, edge: int = 1) -> Tensor:
        """[B, Tq, Tk] bool: what the tokens, as queries, see of `keys`; `family_window` is the family's own.

        With `edge`, the window begins as for `window_attention`.

        Padding sees itself, because a query that sees nothing gives NaN.
        """
        query, key = self.numbers.unsqueeze(2), keys.numbers.unsqueeze(1)
        distance = query - key
        reach = (query - 1) // edge * edge + 1 - key
        seen = (distance >= 0) & (key > 0) & ((reach < window) | (key <= sinks))
        if family_window is not None:
            seen = seen & (distance < family_window)
        if self.sequences is not None and keys.sequences is not None:
            seen = seen & (self.sequences.unsqueeze(2) == keys.sequences.unsqueeze(1))
        queries, all_keys = self.numbers.shape[1], keys.numbers.shape[1]
        places = torch.arange(all_keys, device=key.device)  # the queries are the last of the keys
        itself = places == places[all_keys - queries :, None]
        return seen | (itself & (query == 0))


class SinkCache:
    """Stands for the cache in one call of the family's attention.

    Sinks have places of their own, token number n the place n - 1; the others go round through `window` places.

    Args:
        state: the tensors before the call; empty before the first token.
        tokens: those of the call.
        in_place: put a single token without padding into the tensors of `state`, where its queries see it.
        cu_seqlens: boundaries of sequences packed into one row, which begin in the call.

    `seen` are the tokens that `update` returns, and `state` is that after it.
    """

    def __init__(
        self,
        window: int,
        sinks: int,
        state: State,
        tokens: Tokens,
        in_place: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> None:
        self.window, self.sinks, self.old, self.tokens, self._in_place = window, sinks, state, tokens, in_place
        self._cu_seqlens = cu_seqlens
        self.state: State = {}
        self.seen = tokens
        if in_place:
            self._place = self._places(tokens.numbers)
            state["numbers"].scatter_(1, self._place, tokens.numbers)
            state["count"].copy_(tokens.numbers[:, 0])
            self.seen = Tokens(state["numbers"], None)
        elif state:
            rows = state["numbers"].shape[0]
            numbers = torch.cat([state["numbers"], tokens.numbers.expand(rows, -1)], dim=1)
            self.seen = Tokens(numbers, None)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes the keys and values [B, HK, T, D] of the call; returns those that its queries may see."""
        if self._in_place:
            place = self._place[:, None, :, None].expand_as(keys)
            self.state = self.old
            return self.old["keys"].scatter_(2, place, keys), self.old["values"].scatter_(2, place, values)
        batch, heads, length, head_dim = keys.shape
        window, sinks = self.window, self.sinks
        if self._cu_seqlens is not None:
            self.state = _kept_of_packed(keys[0], values[0], window, sinks, self._cu_seqlens.long())
            return keys, values
        numbers = self.tokens.numbers.expand(batch, length)
        old = self.old or {
            "keys": keys.new_zeros(batch, heads, window + sinks, head_dim),
            "values": values.new_zeros(batch, heads, window + sinks, head_dim),
            "numbers": numbers.new_zeros(batch, window + sinks),
            "count": numbers.new_zeros(batch),
        }
        count = torch.maximum(old["count"], numbers.amax(dim=1))
        is_sink = (numbers > 0) & (numbers <= sinks)
        stays = is_sink | (numbers > (count - window)[:, None]) & (numbers > 0)
        # What does not stay goes to one place more, which is cut off.
        place = torch.where(stays, self._places(numbers), window + sinks)
        self.state = {
            "keys": _put(old["keys"], keys, place),
            "values": _put(old["values"], values, place),
            "numbers": _put(old["numbers"][:, None, :, None], numbers[:, None, :, None], place)[:, 0, :, 0],
            "count": count,
        }
        if not self.old:
            return keys, values
        return torch.cat([old["keys"], keys], dim=2), torch.cat([old["values"], values], dim=2)

    def _places(self, numbers: Tensor) -> Tensor:
        """The places [B, T] of tokens by their numbers from 1."""
        return torch.where(numbers <= self.sinks, numbers - 1, self.sinks + numbers % self.window).long()


def window_shapes(heads: int, head_dim: int, places: int, dtype: torch.dtype) -> dict[str, TensorShape]:
    """The state of one sequence, with S = `places`."""
    kept = TensorShape((heads, places, head_dim), dtype)
    numbers, count = TensorShape((places,), torch.int32), TensorShape((), torch.int32)
    return {"keys": kept, "values": kept, "numbers": numbers, "count": count}


def _kept_of_packed(keys: Tensor, values: Tensor, window: int, sinks: int, cu_seqlens: Tensor) -> State:
    """The state after each of N sequences, of whose tokens keys and values [HK, T, D] are the row."""
    count = cu_seqlens.diff()[:, None]
    place = torch.arange(window + sinks, device=keys.device)
    numbers = torch.where(place < sinks, place + 1, count - (count - place + sinks) % window)
    numbers = numbers * ((numbers <= count) & (numbers > torch.where(place < sinks, 0, sinks)))
    at = cu_seqlens[:-1, None] + (numbers - 1).clamp_min(0)
    kept = [x[:, at].transpose(0, 1) * (numbers > 0)[:, None, :, None] for x in (keys, values)]
    return {"keys": kept[0], "values": kept[1], "numbers": numbers.int(), "count": count[:, 0].int()}


def _put(old: Tensor, new: Tensor, place: Tensor) -> Tensor:
    """`old` [B, HK, S, D] with the tokens `new` [B, HK, T, D] at the places [B, T]; place S is dropped."""
    room = torch.cat([old, old[:, :, :1]], dim=2)
    return room.scatter(2, place[:, None, :, None].expand_as(new), new)[:, :, :-1].contiguous()
