"""Softmax models with the fast form and decoding by graph, as converted models have them."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from deltanet_hf.decoding.generation import GraphedGeneration
from deltanet_hf.fast import fast_form, with_fast_form
from deltanet_hf.mixers.attention.paired_class import paired_class


class Served(GraphedGeneration):
    """Comes before the class of a softmax model (`paired_class`)."""

    forward: Any

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.forward = with_fast_form(super().forward)  # type: ignore[misc]


def serve(model: PreTrainedModel) -> PreTrainedModel:
    """Have calls without gradients and `generate` of a softmax model take its fast form; returns the model itself.

    Its class becomes one of the same name. A converted model, and one that has no fast form, stays as it is.
    """
    own: Any = type(model)
    if not isinstance(fast_form(model), str) and not isinstance(model, GraphedGeneration):
        model.__class__ = paired_class(Served, own, own.__name__)
    return model
