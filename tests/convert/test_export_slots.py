"""The arrangement of a model's layers in an export."""

from __future__ import annotations

from itertools import combinations

import pytest

from deltanet_convert.export.slots import arrange, fixed_interval

SUBSETS = [kept for count in range(6) for kept in combinations(range(6), count)]


@pytest.mark.parametrize("style", ["transformers", "mlx", "gguf"])
def test_every_layer_keeps_its_kind_and_its_order(style: str) -> None:
    for kept in SUBSETS:
        slots = arrange(kept, 6, style)
        assert [layer for layer in slots.sources if layer is not None] == list(range(6)), kept
        assert {slots.sources[place] for place in slots.softmax} - {None} == set(kept), kept
        assert slots.softmax, kept  # an attention layer whose cache counts tokens
        if style != "transformers":
            interval = slots.softmax[0] + 1
            assert slots.softmax == tuple(range(interval - 1, len(slots.sources), interval)), kept
        if kept and (style == "transformers" or fixed_interval(kept, 6) is not None):
            assert slots.idle == 0, kept


def fewest_places(kept: tuple[int, ...], layers: int) -> int:
    """Finds the best arrangement by trying every interval and length: the kinds of the layers are a subsequence."""
    for length in range(layers, 3 * layers):
        for interval in range(2, length + 1):
            places = iter([(place + 1) % interval == 0 for place in range(length)])
            if all((layer in kept) in places for layer in range(layers)):
                return length
    raise AssertionError("no arrangement")


def test_idle_layers_are_as_few_as_can_be() -> None:
    for kept in SUBSETS:
        if kept:
            assert len(arrange(kept, 6, "gguf").sources) == fewest_places(kept, 6), kept


def test_idle_layers_of_a_deep_model() -> None:
    for kept, idle in (((3, 9, 17, 25), 6), ((5, 11, 17, 23, 29), 0), ((), 1)):
        assert arrange(kept, 30, "gguf").idle == idle


def test_interval() -> None:
    for kept, layers, interval in (([], 4, 5), ([1, 3], 4, 2), ([2], 4, 3), ([0, 1], 2, 1), ([0, 3], 4, None)):
        assert fixed_interval(kept, layers) == interval, kept
