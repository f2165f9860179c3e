"""Softmax attention of whole heads whose positions reach further than the teacher's (`layer/layer_call.py`)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deltanet_hf.mixers.attention.routed_config import RoutedConfig
from deltanet_hf.mixers.layer.layer_call import Angles, whole_angles

IMPLEMENTATION = "deltanet_scaled_queries"  # the name under which the families' attention finds `attend`


class FarSoftmax:
    """Stands before the class of a family's attention (`paired_class`), all of whose heads are whole."""

    implementation: ClassVar[str | None] = None
    """The name under which the family's attention finds a function of its own; None for the model's."""
    config: Any

    def further(self, own: Tensor, call: dict[str, Any]) -> dict[str, Any]:
        """The further arguments of that function, after q, k and v, where the angles have a tensor for them.

        Args:
            own: that tensor, the last of the angles.
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
        further = {} if own is None else self.further(own, kwargs)  # None under a window, too
        return super().forward(  # type: ignore[misc, no-any-return]
            hidden_states=hidden_states,
            position_embeddings=angles,
            attention_mask=attention_mask,
            **further,
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

    def further(self, own: Tensor, call: dict[str, Any]) -> dict[str, Any]:
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
