"""The positions of the heads of a model that reads further than its teacher.

Windows never see a distance that the teacher was not trained on, but whole heads do, and sinks are as far away as the
text is long. So whole heads have positions of their own, and sinks are seen as from a bounded one. Such a model hands
its layers six or seven tensors in the place of cos and sin, each [B or 1, T, ...]:

    cos, sin                   the teacher's, for windows
    whole_cos, whole_sin       those of whole heads
    turn_cos, turn_sin         by which a query turns back from its position p to min(p, bound), before it meets sinks
    scale                      of the queries of whole heads [B or 1, T], where they have one

The caches hold keys as these rotate them; nothing is rotated when they are read.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deltanet_hf.mixers.attention.paired_class import paired_class
from deltanet_hf.mixers.attention.routed_config import RoutedConfig
from deltanet_hf.mixers.layer.layer_kind import PositionEmbeddings

IMPLEMENTATION = "deltanet_scaled_queries"  # the name under which the families' attention finds `attend`

Angles = tuple[Tensor, ...]
"""See the module's docstring; cos and sin alone in a model that reads as far as its teacher."""


def whole_angles(angles: Angles) -> tuple[PositionEmbeddings, Tensor | None]:
    """Cos and sin of whole heads, and the scale of their queries [B or 1, T], if they have one."""
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
    seen = 0 if cache is None else cache.get_seq_length()
    # The host does not know how long texts are in static caches and while a recorded step is replayed.
    unknown = isinstance(seen, Tensor) or (cache is not None and cache.fixed)
    is_beyond = bound is not None and (unknown or seen + length > bound)
    return (angles[0], angles[1]), (angles[4], angles[5]) if is_beyond else None


class FarSoftmax:
    """Stands before the class of a family's attention (`paired_class`), all of whose heads are whole."""

    config: Any
    scales_queries: bool

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Angles,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention's signature. hidden_states [B, T, hidden] -> ([B, T, hidden], attention weights or None)."""
        angles, scale = whole_angles(position_embeddings)
        scaled = {} if scale is None else {"query_scale": scale}
        return super().forward(  # type: ignore[misc, no-any-return]
            hidden_states=hidden_states,
            position_embeddings=angles,
            attention_mask=attention_mask,
            **scaled,
            **kwargs,
        )

    def route(self) -> None:
        """Let the family's attention find `attend`, if queries have a scale."""
        if self.scales_queries:
            self.config = RoutedConfig(self.config, IMPLEMENTATION)


def make_far(attention: Any, scales_queries: bool) -> None:
    """Let a family's attention rotate by the angles of whole heads."""
    family = type(attention)
    attention.__class__ = paired_class(FarSoftmax, family, f"Far{family.__name__}")
    attention.scales_queries = scales_queries
    attention.route()


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, query_scale: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The model's own attention function on queries [B, HQ, T, D] times their scale [B or 1, T]."""
    by_family: Any = sys.modules[type(module).__module__]
    name = module.config.whole._attn_implementation
    function = ALL_ATTENTION_FUNCTIONS.get_interface(name, by_family.eager_attention_forward)
    scaled = query * query_scale[:, None, :, None].to(query.dtype)
    return function(module, scaled, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]


AttentionInterface.register(IMPLEMENTATION, attend)
