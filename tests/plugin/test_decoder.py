"""`LayerwiseDecoder`; that its layers compute what the model computes is what tests of conversions and recipes show."""

from __future__ import annotations

import pytest

from deltanet_hf.models.decoder import LayerwiseDecoder
from support.tiny_models import tiny_teacher


def test_the_model_is_unchanged_after_an_error() -> None:
    model = tiny_teacher("llama")
    layers, norm = model.model.layers, model.model.norm
    with pytest.raises(ValueError, match="input_ids"):
        LayerwiseDecoder(model).enter()
    assert model.model.layers is layers
    assert model.model.norm is norm
