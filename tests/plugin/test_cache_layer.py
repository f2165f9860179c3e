"""A new kind of cache is a class, and a row in the layer that keeps it: nothing else has to know of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from deltanet_hf.decoding.captured_step import StaticCacheBuffers, layout
from deltanet_hf.mixers.cache.cache_bytes import cache_bytes
from deltanet_hf.mixers.cache.key_values import as_cache_layer
from deltanet_hf.mixers.cache.mixed_cache import MixedCacheLayer
from deltanet_hf.mixers.cache.protocol import TensorShape
from deltanet_hf.mixers.cache.state import MixerCacheLayer
from deltanet_hf.mixers.layer.mixer import Mixer
from deltanet_hf.sessions import Snapshot, load_session, save_session
from support.tiny_models import teacher_config, tiny_student

CONFIG: Any = SimpleNamespace()  # no sliding windows


class Log(MixerCacheLayer):
    """A state of constant size, and a number per token."""

    grows = True

    def shapes(self, tokens: int) -> dict[str, TensorShape]:
        return {**super().shapes(tokens), "log": TensorShape((tokens,), torch.float32)}


def filled(tokens: int) -> DynamicCache:
    """A cache of two sequences in one layer: a log, beside growing keys and values."""
    torch.manual_seed(0)
    log, softmax, cache = Log(), DynamicLayer(), DynamicCache()
    log.advance(tokens, {"state": torch.randn(2, 3, 3), "log": torch.randn(2, tokens)})
    softmax.update(torch.randn(2, 1, tokens, 4), torch.randn(2, 1, tokens, 4))
    cache.layers.append(MixedCacheLayer({"log": log, "softmax": softmax}, "softmax"))
    return cache


def test_a_sliding_layer_takes_prompts_shorter_than_its_window() -> None:
    layer = as_cache_layer(DynamicCache(config=teacher_config("mistral")).layers[0])
    assert [layer.takes_prompt(tokens) for tokens in (7, 8)] == [True, False]


def test_its_tensors_grow_at_fixed_addresses_and_come_back() -> None:
    cache = filled(7)
    (layer,), own = cache.layers, dict(as_cache_layer(cache.layers[0]).tensors())
    assert layout(cache, CONFIG) == layout(filled(5), CONFIG)
    assert cache_bytes(cache) == 4 * 2 * (9 + 7 + 2 * 7 * 4)
    snapshot, buffers = Snapshot(cache), StaticCacheBuffers(cache, CONFIG, 64, torch.bool)
    buffers.load(cache, 7, None)
    room = layer.parts["log"].state
    assert room["log"].shape == (2, 64)
    assert room["log"][:, :7].equal(own["log.log"])
    with buffers.taken_back(cache):
        room["state"].zero_()
    assert room["state"].equal(own["log.state"])
    room["log"][:, 7] = 1.0
    buffers.advance()
    assert not buffers.full
    buffers.unload(cache)
    assert cache.layers[0] is layer
    assert layer.parts["log"].state["log"].equal(torch.cat([own["log.log"], torch.ones(2, 1)], dim=1))
    assert layer.parts["log"].tokens_seen == 8
    snapshot.rewind()
    found = as_cache_layer(cache.layers[0]).tensors()
    assert all(found[name].equal(own[name]) for name in own)
    first = as_cache_layer(layer).after(4, torch.clone).tensors()
    assert first["log.log"].equal(own["log.log"][:, :4])
    assert first["softmax.keys"].equal(own["softmax.keys"][:, :, :4])
    assert first["log.state"].equal(own["log.state"])


@torch.no_grad()
def test_a_kind_that_grows_is_refused_in_a_static_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mixer, "cache_class", Log)
    model = tiny_student("llama")
    cache = StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(ValueError, match=r"^cache: a static cache has no room for what grows with the tokens \(Log\)"):
        model(torch.arange(3, 12)[None], past_key_values=cache, use_cache=True)


@torch.no_grad()
def test_a_layer_names_its_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    class Other(MixerCacheLayer):
        pass

    monkeypatch.setattr(Mixer, "cache_class", Other)
    model, cache, ids = tiny_student("llama"), DynamicCache(), torch.arange(3, 12)[None]
    model(ids, past_key_values=cache, use_cache=True)
    save_session(tmp_path / "s", model, cache, ids)
    for held in (cache, load_session(tmp_path / "s", model).cache):
        assert {type(layer) for layer in held.layers} == {Other}
