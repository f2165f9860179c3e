"""The parts of the vLLM plugin that need no vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deltanet_hf.mixers.cache.state import TensorShape
from deltanet_hf.models import factory, qwen3_5
from deltanet_hf.models.layers import layer_kinds
from deltanet_hf.vllm_plugin import ARCHITECTURES, register
from deltanet_hf.vllm_plugin.pages import ALIGNMENT, bytes_of, in_order, page_bytes, shared, tensors_in
from support.tiny_models import mixture_table, tiny_mixture

SHAPES = in_order(
    {
        "tail": TensorShape((5, 3), torch.bfloat16),  # an odd number of 2-byte elements, and wider ones behind it
        "state": TensorShape((2, 4, 4), torch.float32),
        "count": TensorShape((), torch.int32),
        "flags": TensorShape((7,), torch.int8),
    }
)


def test_every_architecture_is_the_name_of_a_model_class() -> None:
    assert len(set(ARCHITECTURES)) == len(ARCHITECTURES)
    for name in ARCHITECTURES:
        module = qwen3_5 if name == qwen3_5.MODEL_NAME else factory
        assert getattr(module, name).__name__ == name


def test_the_entry_point_names_the_function() -> None:
    root = Path(__file__).parents[2]
    section = (root / "pyproject.toml").read_text().split('[project.entry-points."vllm.general_plugins"]')[1]
    assert section.split("\n")[1] == f'deltanet-hf = "{register.__module__}:{register.__name__}"'


def test_without_a_fitting_vllm_nothing_is_registered(caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    register()
    assert "vLLM 0.25 to 0.32" in caplog.text


def test_the_tensors_of_a_page_are_apart_and_fill_it_but_for_its_end() -> None:
    size = page_bytes(SHAPES)
    used = sum(shape.nbytes for shape in SHAPES.values())
    assert size % ALIGNMENT == 0
    assert used <= size < used + ALIGNMENT
    pages = torch.zeros(3, size, dtype=torch.int8)
    views = tensors_in(pages, SHAPES)
    for name, view in views.items():
        assert view.shape == (3, *SHAPES[name].shape)
        assert view.dtype == SHAPES[name].dtype
        view[1] = 1
    for name, view in views.items():
        assert (view[1] == 1).all(), name  # no later tensor has overwritten it
        assert (view[0] == 0).all(), name
        assert (view[2] == 0).all(), name


def test_the_bytes_of_tensors_are_found_in_their_page() -> None:
    tensors = {name: torch.randn(3, *one.shape).mul(9).to(one.dtype) for name, one in SHAPES.items()}
    pages = torch.zeros(3, page_bytes(SHAPES), dtype=torch.int8)
    rows = bytes_of(tensors, SHAPES)
    pages[:, : rows.shape[1]] = rows
    views = tensors_in(pages, SHAPES)
    for name, view in views.items():
        assert torch.equal(view, tensors[name]), name
    assert torch.equal(bytes_of(views, SHAPES), rows)


def test_pages_may_be_wider_than_the_state() -> None:
    pages = torch.zeros(4, page_bytes(SHAPES) + 3 * ALIGNMENT, dtype=torch.int8)
    views = tensors_in(pages, SHAPES)
    views["state"][2] = 7.0
    assert pages[2].any()
    assert not pages[[0, 1, 3]].any()


def test_small_parts_share_pages() -> None:
    """The largest first, each in the emptiest page."""
    assert shared([3, 10, 7, 4, 3], 0) == [(0, 10), (0, 0), (1, 0), (1, 7), (1, 11)]  # two pages, of at least 10
    assert shared([3, 10, 7, 4, 3], 27) == [(0, 21), (0, 0), (0, 10), (0, 17), (0, 24)]
    assert shared([5, 5, 5], 0) == [(0, 0), (1, 0), (2, 0)]
    assert shared([], 0) == []


def test_the_states_of_a_models_layers_fit_into_their_pages() -> None:
    for index, layer in layer_kinds(tiny_mixture("llama", mixture_table())):
        shapes = in_order(layer.state_shapes(torch.bfloat16))
        pages = torch.zeros(2, page_bytes(shapes), dtype=torch.int8)
        views = tensors_in(pages, shapes)
        assert {name: tuple(view.shape[1:]) for name, view in views.items()} == {
            name: shape.shape for name, shape in shapes.items()
        }, index
