"""Sequences packed into one row, whose states are kept as those of each sequence alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from deltanet_hf.fast.decoder import fast_mixer
from deltanet_hf.fast.packed import FastPacked, is_packed
from deltanet_hf.mixers import MIXERS
from deltanet_hf.mixers.cache.state import MixerCacheLayer
from deltanet_hf.mixers.layer.layer_call import CacheView
from deltanet_hf.mixers.layer.mixer import Mixer
from deltanet_hf.models.cache_bits import set_cache_bits
from support.tiny_models import tiny_mixture, tiny_student, tiny_table

LENGTHS = (5, 1, 40, 7, 66)
NEAR = {"window": 5, "sinks": 2}
RECURRENT = [name for name, kind in MIXERS.items() if issubclass(kind, Mixer)]
MODELS = {
    **{name: lambda name=name: tiny_student("llama", mixer=name) for name in RECURRENT},
    "normalised": lambda: tiny_student("llama", mixer="deltanet", normalised=True),
    "near": lambda: tiny_student("llama", **NEAR),
    "near, sliding": lambda: tiny_student("gemma2", **NEAR),
    "near, 4 bits": lambda: set_cache_bits(tiny_student("llama", **NEAR), 4),
    "window": lambda: tiny_student("llama", mixer="window", **NEAR),
    "window, no sinks": lambda: tiny_student("qwen3", mixer="window", window=9, sinks=0),
    "window, 4 bits": lambda: set_cache_bits(tiny_student("llama", mixer="window", window=40, sinks=2), 4),
    "softmax, 4 bits": lambda: set_cache_bits(tiny_mixture("llama", tiny_table(layers=())), 4),
}


def forms(layer: Any) -> list[Any]:
    """The layer, and its fast form if it has one."""
    if isinstance(layer, Mixer):
        return [layer, fast_mixer(layer, False)]
    return [layer, FastPacked(layer, False)] if is_packed(layer) else [layer]


def called(layer: Any, model: Any, x: torch.Tensor, positions: torch.Tensor, **options: Any) -> torch.Tensor:
    angles = model.model.rotary_emb(x, positions)
    output: torch.Tensor = layer(hidden_states=x, position_embeddings=angles, **options)[0]
    return output


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_each_sequence_leaves_the_state_that_it_leaves_alone(name: str) -> None:
    model: PreTrainedModel = MODELS[name]()
    layer: Any = model.model.layers[0].self_attn
    x = torch.randn(1, sum(LENGTHS), 32, generator=torch.Generator().manual_seed(0))
    bounds = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    for form in forms(layer):
        cache = MixerCacheLayer()
        packed = CacheView(cache, lengths=LENGTHS)
        output = called(form, model, x, positions, past_key_values=packed, cu_seq_lens_q=bounds)
        for row, part in enumerate(x.split(LENGTHS, dim=1)):
            alone = MixerCacheLayer()
            own = called(form, model, part, torch.arange(part.shape[1])[None], past_key_values=alone)
            torch.testing.assert_close(output[:, bounds[row] : bounds[row + 1]], own, rtol=2e-4, atol=2e-4)
            assert cache.state.keys() == alone.state.keys()
            for key, wanted in alone.state.items():
                found = cache.state[key][row : row + 1]
                if found.shape != wanted.shape:  # groups of the longest sequence
                    found = found[:, :, : wanted.shape[2]]
                torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)
