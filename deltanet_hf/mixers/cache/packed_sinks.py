"""Packed keys and values of a window whose sinks are seen from a bounded position (`sinks_apart.py`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from deltanet_hf.mixers.cache.quantised_cache_spec import QuantisedCacheSpec
from deltanet_hf.mixers.cache.quantised_kv_cache import QuantisedKVCache
from deltanet_hf.mixers.cache.sinks_apart import Scores, leaves_out, with_sinks
from deltanet_hf.mixers.cache.window_cache import Tokens
from deltanet_kernels import round_tokens
from deltanet_kernels.common.rotation import turned
from deltanet_kernels.packed_cache.calls import RoundTokensCall
from deltanet_kernels.packed_cache.layout import SINKS, tokens_of


def kv_cache(turn: tuple[Tensor, Tensor] | None) -> Callable[..., QuantisedKVCache]:
    """The class of packed keys and values, with sinks that are seen by this `turn`, if there is one."""
    return QuantisedKVCache if turn is None else functools.partial(TurnedSinks, turn=turn)


class TurnedSinks(QuantisedKVCache):
    """As the base class, for queries that are turned before they meet the sinks outside of their window.

    Args:
        spec, more: as for the base class.
        turn: cos and sin [B or 1, T, R] of the way back.
    """

    turn: tuple[Tensor, Tensor]

    def __init__(self, spec: QuantisedCacheSpec, *more: Any, turn: tuple[Tensor, Tensor], **named: Any) -> None:
        super().__init__(spec, *more, **named)
        self.turn = turn

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
        """As in the base class."""
        if self._padding is None and self.state and q.shape[1] == 1:
            return super().attend(q, k, v, scale, softcap)  # by `step`, which turns queries itself
        tokens = Tokens.of(len(q), q.shape[1], self._padding, None, self.state.get("count"), q.device)
        spec, self.spec = self.spec, replace(self.spec, sinks=0)
        assert spec.window is not None
        near, lse = super().attend(q, k, v, scale, softcap)
        keys, values = (x[:, : spec.sinks] for x in self._first(k, v))
        seen = leaves_out(tokens.numbers, keys.shape[1], spec.window, spec.edge)
        return with_sinks(near, lse, turned(q, self.turn), keys, values, seen, Scores(scale, softcap))

    def _first(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the first tokens [B, S, HK, D], in 8 bits."""
        if not self.state:  # a text that is read without a cache
            return round_tokens.unchecked(RoundTokensCall(k[:, :SINKS], v[:, :SINKS]))
        cache = self._cache(self.state)
        first = {name: getattr(cache, name)[:, :, :SINKS] for name in ("keys", "values", "token_scales")}
        keys, values = tokens_of(cache._replace(**first), k.dtype)
        return keys.transpose(1, 2), values.transpose(1, 2)
