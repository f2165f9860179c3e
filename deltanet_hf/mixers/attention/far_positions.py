"""The positions of the heads of a model that reads further than its teacher.

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

import sys
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deltanet_hf.mixers.attention.routed_config import RoutedConfig
from deltanet_hf.mixers.layer.layer_kind import PositionEmbeddings

IMPLEMENTATION = "deltanet_scaled_queries"  # the name under which the families' attention finds `attend`

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


class FarSoftmax:
    """Stands before the class of a family's attention (`paired_class`), all of whose heads are whole."""

    implementation: ClassVar[str | None] = None
    """The name under which the family's attention finds a function of its own; None for the model's."""
    config: Any

    def further(self, own: Tensor | None, call: dict[str, Any]) -> dict[str, Any]:
        """The further arguments of that function, after q, k and v.

        Args:
            own: the last of the angles.
            call: further arguments of the layer's call.
        """
        return {}

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Angles,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention's signature. hidden_states [B, T, hidden] -> ([B, T, hidden], attention weights or None)."""
        angles, own = whole_angles(position_embeddings)
        return super().forward(  # type: ignore[misc, no-any-return]
            hidden_states=hidden_states,
            position_embeddings=angles,
            attention_mask=attention_mask,
            **self.further(own, kwargs),
            **kwargs,
        )

    def take(self, rotary: nn.Module, limit: int) -> None:
        """Take the family's rotary embedding and the teacher's number of positions, where `further` needs them."""

    def route(self) -> None:
        """Let the family's attention find its function."""
        if self.implementation is not None:
            self.config = RoutedConfig(self.config, self.implementation)


class ScaledSoftmax(FarSoftmax):
    """As the base class, with queries that have a scale."""

    implementation = IMPLEMENTATION

    def further(self, own: Tensor | None, call: dict[str, Any]) -> dict[str, Any]:
        return {"query_scale": own}


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, query_scale: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The model's own attention function on queries [B, HQ, T, D] times their scale [B or 1, T]."""
    scaled = (query * query_scale[:, None, :, None]).to(query.dtype)
    return own_attention(module)(module, scaled, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]


def own_attention(module: Any) -> Callable[..., Any]:
    """The attention function that the model's configuration names."""
    by_family: Any = sys.modules[type(module).__module__]
    name = module.config.whole._attn_implementation
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, by_family.eager_attention_forward)  # type: ignore[no-any-return]


AttentionInterface.register(IMPLEMENTATION, attend)
