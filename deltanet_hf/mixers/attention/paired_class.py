"""Classes made of two: one of ours before a class of a model family."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from deltanet_hf.errors import UserError


def require_own_forward(attention: nn.Module, layer_idx: int, change: str) -> None:
    """Raises UserError if something has replaced a module's forward function, which `change` has to precede."""
    if "forward" in vars(attention):
        raise UserError(f"layer {layer_idx}: its attention is offloaded or compiled; {change} before that")


def paired_class(front: Any, base: Any, name: str) -> Any:
    """The class `name` with the bases `front` and `base`, always the same one.

    No module holds it under its name, so its objects are pickled as the pair and their attributes.
    """
    return _made(front, base, name)


def behind(front: type, made: type) -> type:
    """The base of a class whose front is `front`; any other class itself."""
    return made.__bases__[1] if issubclass(made, front) else made


@functools.cache
def _made(front: Any, base: Any, name: str) -> Any:
    def __reduce_ex__(self: Any, protocol: int) -> tuple[Any, ...]:
        return _empty, (front, getattr(base, "pair", base), name), vars(self)

    namespace = {"__module__": base.__module__, "__qualname__": name, "__reduce_ex__": __reduce_ex__}
    return type(name, (front, base), {**namespace, "pair": (front, base, name)})


def _empty(front: Any, base: Any, name: str) -> Any:
    """An object of the class without attributes; a base that is made of two itself is given as its pair."""
    made = paired_class(front, paired_class(*base) if isinstance(base, tuple) else base, name)
    return made.__new__(made)
