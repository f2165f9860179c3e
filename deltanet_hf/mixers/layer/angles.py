"""Angles of a model that reads further than its teacher, which its layers get in the place of cos and sin.

Windows never see a distance that the teacher was not trained on, but whole heads do, and sinks are as far away as the
text is long. So whole heads have positions of their own, and sinks are seen as from a bounded one. Such a model hands
its layers six or seven tensors in the place of cos and sin, each [B or 1, T, ...]:

    cos, sin                   the teacher's, for windows
    whole_cos, whole_sin       those of whole heads
    turn_cos, turn_sin         by which a query turns back from its position p to min(p, bound), before it meets sinks
    scale, or positions        of the queries of whole heads [B or 1, T], where their attention takes one

The caches hold keys as these rotate them. Nothing is rotated when they are read, but where distances are cut.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deltanet_hf.mixers.layer.layer_kind import PositionEmbeddings

Angles = tuple[Tensor, ...]
"""See the module's docstring; cos and sin alone in a model that reads as far as its teacher."""


def whole_angles(angles: Angles) -> tuple[PositionEmbeddings, Tensor | None]:
    """Cos and sin of whole heads, and the last tensor [B or 1, T], if there is one."""
    first = 2 if len(angles) > 2 else 0
    return (angles[first], angles[first + 1]), angles[6] if len(angles) > 6 else None


def window_angles(
    angles: Angles, bound: int | None, cache: Any, length: int
) -> tuple[PositionEmbeddings, PositionEmbeddings | None]:
    """Cos and sin of a window, and those of the way back, which only texts beyond the bound need.

    Args:
        bound: the furthest position from which sinks are seen; None for any.
        cache: the layer's part of the cache before the call, or None.
        length: tokens of the call.
    """
    longest = 0 if cache is None else cache.get_seq_length()
    if cache is not None and cache.fixed:  # a captured step is replayed for all further tokens
        longest = cache.longest
    # The host does not know how long texts are in static caches.
    unknown = longest is None or isinstance(longest, Tensor)
    # A teacher's angles, by which layers are fitted and aligned, have no way back.
    is_beyond = bound is not None and len(angles) > 2 and (unknown or longest + length > bound)
    return (angles[0], angles[1]), (angles[4], angles[5]) if is_beyond else None
