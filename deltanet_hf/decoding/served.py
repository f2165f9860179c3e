"""Softmax models with the fast form and decoding by graph, as converted models have them."""

from __future__ import annotations

import functools
from typing import Any

from transformers import PreTrainedModel

from deltanet_hf.decoding.generation import GraphedGeneration
from deltanet_hf.fast import fast_form, with_fast_form


def serve(model: PreTrainedModel) -> PreTrainedModel:
    """Have calls without gradients and `generate` of a softmax model take its fast form; returns the model itself.

    Its class becomes one of the same name. A converted model, and one that has no fast form, stays as it is.
    """
    own: Any = type(model)
    if not isinstance(fast_form(model), str) and not isinstance(model, GraphedGeneration):
        model.__class__ = _served(own)
    return model


@functools.cache
def _served(own: Any) -> Any:
    def __reduce_ex__(self: Any, protocol: int) -> tuple[Any, ...]:
        return _empty, (own,), vars(self)  # no module holds the class under its name

    namespace = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__reduce_ex__": __reduce_ex__,
        "forward": with_fast_form(own.forward),
    }
    return type(own.__name__, (GraphedGeneration, own), namespace)


def _empty(own: Any) -> Any:
    """A model of the class without attributes."""
    made = _served(own)
    return made.__new__(made)
