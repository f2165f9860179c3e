"""Where a layer's state lies in a page of vLLM's cache.

A page holds the whole state of one sequence in one layer: the recurrent state, the last inputs of the convolution, and
the keys and values of a window with its sinks. vLLM's pages have one size, so small states share a page.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deltanet_hf.mixers.cache.state import TensorShape

ALIGNMENT = 64  # bytes; so that the tensors of a page lie at multiples of their element sizes


def page_bytes(shapes: dict[str, TensorShape]) -> int:
    """Bytes of a page for tensors of these shapes."""
    size = sum(shape.nbytes for shape in shapes.values())
    return -(-size // ALIGNMENT) * ALIGNMENT


def shared(sizes: Sequence[int], least: int) -> list[tuple[int, int]]:
    """How parts of these sizes share pages: for each part the number of its page, and what comes before it there.

    There are as many pages as could be filled if they were as large as the largest part, and at least `least`. The
    largest parts come first, each into the emptiest page.
    """
    used = [0] * max(1, sum(sizes) // max([1, least, *sizes]))
    places = [(0, 0)] * len(sizes)
    for part in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        page = used.index(min(used))
        places[part] = page, used[page]
        used[page] += sizes[part]
    return places


def in_order(shapes: dict[str, TensorShape]) -> dict[str, TensorShape]:
    """The shapes in the order in which their tensors lie in a page.

    It is that of the powers of two that divide their sizes, so that each begins at a multiple of its own.
    """
    return dict(sorted(shapes.items(), key=lambda item: -(item[1].nbytes & -item[1].nbytes)))


def tensors_in(pages: Tensor, shapes: dict[str, TensorShape]) -> dict[str, Tensor]:
    """Views [..., *shape] of the tensors in pages [..., bytes] int8, by name; the shapes are `in_order`."""
    views: dict[str, Tensor] = {}
    first = 0
    for name, shape in shapes.items():
        last = first + shape.nbytes
        view = pages[..., first:last].view(shape.dtype)
        views[name] = view.unflatten(-1, shape.shape) if shape.shape else view.squeeze(-1)
        first = last
    return views


def bytes_of(tensors: dict[str, Tensor], shapes: dict[str, TensorShape]) -> Tensor:
    """The beginnings of pages [B, bytes] int8 in which `tensors_in` finds these tensors [B, *shape]."""
    rows = (tensors[name].to(shape.dtype).reshape(len(tensors[name]), -1) for name, shape in shapes.items())
    return torch.cat([row.unsqueeze(-1).view(torch.int8).flatten(1) for row in rows], dim=1)
