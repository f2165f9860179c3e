"""A family's configuration for parts of a layer, and for attention by a function of this package."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig

BY_CALL = "deltanet_window"  # the name under which the families' attention finds `attend`


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, call: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """The attention function that a family's attention calls: `call` computes it (`SoftmaxCall`, `PackedCall`)."""
    return call(module, query, key, value, **options)  # type: ignore[no-any-return]


AttentionInterface.register(BY_CALL, attend)


class PartConfig:
    """Has a few attributes of its own; all others are read from the configuration `whole`, also after they change."""

    whole: PreTrainedConfig

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "whole" not in self.__dict__:  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.whole, name)


class RoutedConfig(PartConfig):
    """A family's configuration that names another attention function.

    Args:
        config: the model's configuration, or that of some of its heads.
        implementation: the name under which `AttentionInterface` has the function.
    """

    def __init__(self, config: PreTrainedConfig, implementation: str) -> None:
        self.whole = config.whole if isinstance(config, RoutedConfig) else config
        self._attn_implementation = implementation
