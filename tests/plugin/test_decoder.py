"""`LayerwiseDecoder`: the layers, called from outside with the recorded arguments, compute what the model computes."""

from __future__ import annotations

import pytest
import torch

from deltanet_hf.models.decoder import LayerwiseDecoder
from deltanet_hf.models.families import FAMILIES
from support.tiny_models import tiny_teacher


@pytest.mark.parametrize("model_type", list(FAMILIES))
@torch.no_grad()
def test_layers_run_from_outside_give_the_models_output(model_type: str) -> None:
    model = tiny_teacher(model_type)
    ids = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(0))
    decoder = LayerwiseDecoder(model)
    inputs = decoder.enter(input_ids=ids)
    hidden = inputs.hidden
    for layer, kwargs in zip(decoder.layers, inputs.kwargs, strict=True):
        hidden = layer(hidden, **kwargs)
    expected = model.model(ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(model.model.norm(hidden), expected, rtol=0, atol=0)


def test_the_model_is_unchanged_after_an_error() -> None:
    model = tiny_teacher("llama")
    layers, norm = model.model.layers, model.model.norm
    with pytest.raises(ValueError, match="input_ids"):
        LayerwiseDecoder(model).enter()
    assert model.model.layers is layers
    assert model.model.norm is norm
