"""Whole models as pickles: `torch.save(model)`, copies, and models that are sent to other processes."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from deltanet_hf.decoding import serve
from deltanet_hf.models.cache_bits import set_cache_bits
from deltanet_hf.models.restrict import restrict_heads, restrict_to_window
from support.tiny_models import tiny_student, tiny_teacher

TOKENS = torch.arange(3, 15).view(1, 12)


def _same(model: torch.nn.Module, other: torch.nn.Module) -> None:
    assert type(other) is type(model)
    with torch.no_grad():
        torch.testing.assert_close(other(TOKENS).logits, model(TOKENS).logits, rtol=0, atol=0)


@pytest.mark.parametrize("mixer", ["gated_deltanet+window", "window", "path"])
def test_a_converted_model(mixer: str) -> None:
    model = tiny_student("llama", mixer=mixer)
    _same(model, pickle.loads(pickle.dumps(model)))
    _same(model, copy.deepcopy(model))


def test_changed_teachers() -> None:
    for model in (
        restrict_to_window(tiny_teacher("qwen3"), 4, 1),
        restrict_heads(tiny_teacher("llama"), {0: [1]}, 4, 1),
        serve(tiny_teacher("llama")),
        set_cache_bits(serve(tiny_teacher("llama")), 4),
        serve(set_cache_bits(tiny_teacher("llama"), 4)),
    ):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        _same(model, torch.load(file, weights_only=False))
        _same(model, copy.deepcopy(model))
