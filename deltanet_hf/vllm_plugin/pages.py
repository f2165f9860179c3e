"""Where a layer's state lies in a page of vLLM's cache.

A page holds the whole state of one sequence in one layer: the recurrent state, the last inputs of the convolution, and
the keys and values of a window with its sinks. vLLM's pages have one size, so small states share a page.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from deltanet_hf.mixers.cache.state import TensorShape

ALIGNMENT = 64  # bytes; so that the tensors of a page lie at multiples of their element sizes


def page_bytes(shapes: dict[str, TensorShape]) -> int:
    """Bytes of a page for tensors of these shapes."""
    size = sum(shape.nbytes for shape in shapes.values())
    return -(-size // ALIGNMENT) * ALIGNMENT


def shared(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where parts of these sizes lie in pages as large as the largest: the number of the part whose page it is, the
    first in it, and what comes before the part. Few pages: each takes the first with room, the largest parts first."""
    places, used = [(0, 0)] * len(sizes), dict[int, int]()
    for part in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        page = next((page for page, end in used.items() if end + sizes[part] <= max(sizes)), part)
        places[part] = page, used.get(page, 0)
        used[page] = places[part][1] + sizes[part]
    return places


def tensors_in(pages: Tensor, shapes: dict[str, TensorShape]) -> dict[str, Tensor]:
    """Views [..., *shape] of the tensors in pages [..., bytes] int8, by name.

    They lie in the order of the powers of two that divide their sizes, so that each begins at a multiple of its own.
    """
    views: dict[str, Tensor] = {}
    first = 0
    for name, shape in sorted(shapes.items(), key=lambda item: -(item[1].nbytes & -item[1].nbytes)):
        last = first + shape.nbytes
        view = pages[..., first:last].view(shape.dtype)
        views[name] = view.unflatten(-1, shape.shape) if shape.shape else view.squeeze(-1)
        first = last
    return views
